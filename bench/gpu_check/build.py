# SPDX-License-Identifier: Apache-2.0
"""The package to check: built now, from an existing build folder, or from a wheel. Uses only the standard library."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import subprocess

from report import say

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Failed(Exception):
    """There is no package. The message is one sentence with the reason."""


@dataclasses.dataclass
class Package:
    python: str  #: the interpreter with torch
    folder: pathlib.Path | None  #: the build folder; None: the package is installed

    def environment(self) -> dict[str, str]:
        """Environment for processes that import remat, the modules of this folder and `emulated`."""
        paths = [ROOT / "bench/gpu_check", ROOT / "bench", ROOT / "adapters/python/tests"]
        env = dict(os.environ)
        if self.folder is not None:
            paths.insert(0, self.folder / "adapters/python")
            env.setdefault("REMAT_PLUGINS", str(self.folder / "adapters/torch"))
            env.setdefault("REMAT_EMULATED", str(self.folder / "adapters/torch/tests/emulated"))
        env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [env.get("PYTHONPATH")])])
        return env

    def suite(self, name: str, tiny: bool) -> list[str] | None:
        """The command that runs a C++ suite on the device. None if the suite is not built, or older than the library.

        tiny: leave out comparisons of many schedules.
        """
        if self.folder is None:
            return None
        programs, library = self.folder / "adapters/torch/tests", self.folder / "adapters/torch/libremat_torch.so"
        room = name.removeprefix("torch_")
        for program, of in ((programs / "torch_tests", f"[#{room}]"), (programs / name, "")):
            if program.exists() and (not library.exists() or program.stat().st_mtime >= library.stat().st_mtime):
                return [str(program), *(["-#"] if of else []), f"{of}[accelerator]" if tiny else f"{of}[device],{of}[accelerator]"]
        return None


def prepare(options: argparse.Namespace) -> Package:
    """Finds, builds or installs the package that the options name. Raises Failed."""
    python = options.python or str(ROOT / ".venv/bin/python")
    if options.built:
        folder = pathlib.Path(options.built).resolve()
        if not (folder / "adapters/python/remat").is_dir():
            raise Failed(f"{folder} has no Python package of remat: ninja -C {options.built} python_package")
        return Package(python, folder)
    if options.wheel:
        if not pathlib.Path(options.wheel).is_file():
            raise Failed(f"there is no wheel {options.wheel}")
        _call([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--force-reinstall", "--no-deps", options.wheel], "pip install")
        return Package(python, None)
    folder = ROOT / "build"
    _call([ROOT / "tools/setup"], "tools/setup")
    if not (folder / "build.ninja").exists():
        _call(["meson", "setup", folder, "-Dunity=on", "-Dunity_size=1000"], "meson setup")
    say("gpu-check: building (some minutes the first time)")
    known = subprocess.run(["ninja", "-C", folder, "-t", "targets", "all"], capture_output=True, text=True).stdout
    plugin = "adapters/torch/libremat_torch_cuda.so"
    _call(["ninja", "-C", folder, "-j", str(os.cpu_count() or 2), "python_package", *([plugin] if plugin + ":" in known else [])], "ninja")
    return Package(python, folder)


def _call(command: list, name: str) -> None:
    try:
        done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    except OSError as e:
        raise Failed(f"{name} does not run: {e}") from None
    if done.returncode:
        text = (done.stdout + done.stderr).strip()
        say(text[-8000:])
        raise Failed(f"{name} failed, as printed above")
