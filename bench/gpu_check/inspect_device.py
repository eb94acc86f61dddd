# SPDX-License-Identifier: Apache-2.0
"""The part `devices`: reports the entries of `remat.devices()` and the versions of the software, and chooses the device."""

from __future__ import annotations

import os
import platform
import subprocess

import torch
from context import Context
from report import FAILED, PASSED, TOLD, cause_of_text, first_line, size

import remat


def cases(tiny: bool) -> list[str]:
    return ["devices"]


def driver() -> str:
    """The version of NVIDIA's driver, or the reason why it is unknown."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
        return first_line(done.stdout or done.stderr)
    except (OSError, subprocess.TimeoutExpired):
        return "no nvidia-smi"


def choose(found: list[dict], wanted: str) -> tuple[dict | None, str]:
    """Returns (device, problem). If no usable device matches, device is None and problem is one sentence with the reason.

    wanted: name of a device; empty for the first usable accelerator.
    """
    accelerators = [d for d in found if d["device"] != "cpu"]
    if wanted == "cpu":
        return None, "cpu is the host, and this checks accelerators"
    if not accelerators:
        return None, "no accelerator: remat.devices() lists the host only"
    if not wanted:
        usable = [d for d in accelerators if not d["problem"]]
        return (usable[0], "") if usable else (None, f"no usable accelerator: {accelerators[0]['device']}: {cause_of_text(accelerators[0]['problem'])}")
    for d in accelerators:
        if d["device"].split(":")[0] == wanted.split(":")[0] and (":" not in wanted or d["device"] in (wanted, wanted.split(":")[0])):
            return (None, f"{d['device']}: {cause_of_text(d['problem'])}") if d["problem"] else (d, "")
    return None, f"there is no device {wanted}: remat.devices() lists {', '.join(d['device'] for d in found)}"


def run(c: Context, case: str) -> None:
    found = remat.devices()
    d, problem = choose(found, os.environ.get("GPU_CHECK_DEVICE", ""))
    for each in found:
        cause = cause_of_text(each["problem"]) if each["problem"] else ""
        c.log.row(each["device"], each["name"], TOLD, cause, total=size(each["total"]), free=size(each["free"]))
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda or "none", "driver": driver(), "python": platform.python_version()}
    c.log.row("environment", platform.platform(), PASSED if d else FAILED, problem, "a device that steps can run on", **versions)
    c.log.tell(device=d["device"] if d else "", problem=problem, versions=versions, devices=found)
