# SPDX-License-Identifier: Apache-2.0
"""One thread, no network, caches of their own."""

import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", WANDB_DISABLED="true")
sys.path.insert(0, os.path.dirname(__file__))

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A folder for what a test writes, and for the cache of plans."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
