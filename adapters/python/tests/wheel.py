# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel from a clean copy of the repository, with only the requirements of pyproject.toml. Installs the wheel in a new
environment, and plans and trains with it.

It trains on the host and, if the build folder has the emulated CUDA, on this device with the plug-in inside the wheel. The environment
sees the packages of the current Python, because a download of torch would take longer than the whole test.

usage: wheel.py BUILD_FOLDER
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import venv
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def call(*command, cwd, **environment):
    """Runs a command and returns its output. If the command fails, this process exits with the output."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit code {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def copy(to):
    """Copies the files of the working tree that git tracks."""
    for name in call("git", "ls-files", "-z", cwd=ROOT, **os.environ).split("\0"):
        if name and (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes((ROOT / name).read_bytes())


def environment_in(folder):
    """Makes an environment without pip that sees the packages of this Python. Returns (its Python, the variables that `activate` sets)."""
    venv.create(folder, symlinks=True)
    site, = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text("".join(path + "\n" for path in sys.path if path.endswith("-packages")))
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "REMAT_PLUGINS")}
    return folder / "bin/python", plain | {"VIRTUAL_ENV": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def check_contents(wheel):
    """The wheel has the program, one extension for the planner, one for sessions, and the plug-in if PyTorch has CUDA. No other library."""
    import torch

    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    libraries = sorted(name.split(".")[0] for name in names if name.endswith(".so"))
    assert libraries == ["remat/_core", "remat/_torch"] + ["remat/libremat_torch_cuda"] * (torch.version.cuda is not None), names
    # No rpath leads to PyTorch's folder in the build environment, which pip deletes after the build.
    assert not any(re.search(rb"(?<!\.\.)/torch/lib[:\0]", archive.read(name)) for name in names if name.endswith(".so")), names
    assert any(name.endswith(".data/scripts/remat") for name in names), names
    assert {f"remat/{source.name}" for source in (ROOT / "adapters/python/remat").glob("*.py")} <= set(names), names


def check_program(program, scratch, **environment):
    """The program of the environment plans with HiGHS, and checks its plan."""
    problem, plan = ROOT / "bench/instances/resnet18.json", pathlib.Path(scratch) / "plan.json"
    assert "highs" in call(program, "list", cwd=scratch, **environment)
    call(program, "solve", problem, "--budget", "60%", "--time-limit", "2", "-o", plan, cwd=scratch, **environment)
    print(call(program, "check", problem, plan, "--budget", "60%", cwd=scratch, **environment).strip())


def main(build):
    emulation = pathlib.Path(build).resolve() / "adapters/torch/tests/emulated"
    with tempfile.TemporaryDirectory() as scratch:
        source, out, outside = (pathlib.Path(scratch) / name for name in ("source", "out", "outside"))
        for folder in (source, outside):
            folder.mkdir()
        copy(source)
        python, variables = environment_in(pathlib.Path(scratch) / "environment")
        pip = (python, "-m", "pip", "--disable-pip-version-check")
        call(*pip, "wheel", ".", "--no-deps", "-w", out, "-Ccompile-args=-j2", cwd=source, **variables)
        wheel, = out.iterdir()
        check_contents(wheel)
        call(*pip, "install", "--no-deps", wheel, cwd=outside, **variables)
        check_program(python.parent / "remat", scratch, **variables)
        variables |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": scratch}
        print(call(python, HERE / "installed.py", cwd=outside, **variables).strip())
        cuda = emulation / "libemulated_cuda.so"
        if cuda.exists():
            variables |= {"REMAT_TEST_DEVICE": "cuda", "REMAT_EMULATED": str(emulation), "LD_PRELOAD": str(cuda), "LD_LIBRARY_PATH": str(emulation)}
            print(call(python, HERE / "installed.py", cwd=outside, **variables).strip())


if __name__ == "__main__":
    main(sys.argv[1])
