# SPDX-License-Identifier: Apache-2.0
"""Setup of all tests: one thread, no network, a cache per test."""

import os
import subprocess
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", WANDB_DISABLED="true")
sys.path.insert(0, os.path.dirname(__file__))

import emulated
import pytest
import torch

torch.set_num_threads(1)
emulated.use_by_default()


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A temporary folder as working directory and for the plan cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class SmallDisk:
    """A file system of 48 MB, mounted at a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def fill(self):
        with open(os.path.join(self.folder, "filler"), "wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                pass

    def free(self):
        os.unlink(os.path.join(self.folder, "filler"))

    def files(self):
        return sorted(set(os.listdir(self.folder)) - {"filler", "lost+found"})


@pytest.fixture(params=["tmpfs", "ext2"])
def small_disk(request, tmp_path):
    """A small tmpfs, which cannot bypass the page cache, or ext2, which cannot reserve space. Skips the test if mounting is not allowed."""
    folder, image = tmp_path / "small", tmp_path / "small.image"
    folder.mkdir()
    image.touch()
    os.truncate(image, 48_000_000)
    commands = {"tmpfs": [["mount", "-t", "tmpfs", "-o", "size=48m", "none", folder]],
                "ext2": [["mkfs.ext2", "-q", "-m", "0", image], ["mount", "-o", "loop", image, folder]]}[request.param]
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no {request.param} can be mounted here: {e}")
    yield SmallDisk(folder)
    subprocess.run(["umount", "-l", folder], check=True)
