# SPDX-License-Identifier: Apache-2.0
"""Runs remat's lines in the tables of docs/coming-from.md on the device of REMAT_TEST_DEVICE. The host skips lines that need an accelerator."""

import functools
import os
import pathlib
import re
import tempfile

import compare  # noqa: F401  # sets a temporary folder for the plan cache
import emulated
import torch
from torch import nn

import remat

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs/coming-from.md"
WORDS = {"the same", "the same line", "none", "nothing", ""}  # cells without code


class Package:
    """The package remat with short searches, because plans need not be fast here."""

    wrap = staticmethod(functools.partial(remat.wrap, planner=remat.Planner(time_limit=1, gap=0.9)))
    curve = staticmethod(functools.partial(remat.curve, time_limit=2))

    def __getattr__(self, name):
        return getattr(remat, name)


def rows(text):
    """Yields (section, cell of the other package, cell of remat) per row of all tables."""
    section = None
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith("| ---"):
            cells = [c.strip() for c in line.strip("|").split(" | ")]
            if len(cells) == 3 and cells[1] != "remat":
                yield section, cells[0], cells[1]


def names(folder, device):
    """The variables that the lines of the tables use."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(3)))
    model = blocks.to(device)
    x = torch.randn(4096, 32).to(device)
    found = {"remat": Package(), "torch": torch, "model": model, "wrapped_model": model, "blocks": blocks, "block": blocks[0], "x": x, "image": x,
             "module": nn.Linear(2, 2), "label": torch.zeros_like(x), "loss_function": nn.functional.mse_loss, "sample": x, "budget": 2**30}
    found["optimizer"] = found["opt"] = torch.optim.Adam(model.parameters())
    found["loss"] = model(x).sum()
    return found


def run(section, code, folder):
    """Runs the lines of one row, then a step of the model. Returns False if the row is skipped."""
    lines = [re.sub(r'"/(scratch|nvme)"', repr(folder), line).replace('"40 GiB"', '"1 GiB"').replace('"cuda"', repr(str(emulated.device))) for line in code]
    text = "\n".join(lines)
    moves = "offload=" in text and "disk=" not in text
    if emulated.on_host and moves or not emulated.on_host and "disk=" in text or (section == "DeepSpeed" and "model=model" in text and emulated.on_host):
        return False
    device = "cpu" if "device=" in text else emulated.device
    found = names(folder, device)
    if section == "Rockmate":
        from remat.rockmate import Offmate, PureRockmate

        found |= {"rk": PureRockmate(found["model"], found["x"], 2**30), "Offmate": Offmate, "PureRockmate": PureRockmate}
    if "accumulate" in text:  # this row needs a model that is wrapped for steps on the device
        remat.wrap(found["model"], device=emulated.device, offload="all")
    if "plan[" in text:
        remat.wrap(found["model"], (found["x"],), budget="90% of activations")
    for line in lines:
        if line.endswith("import ..."):
            line = line.replace("...", "*")
        exec(line, found)
    if "module" not in text:
        found["model"](found["x"]).sum().backward()
    return True


def main():
    ran = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # a row writes a picture to the working directory
        for section, _, ours in rows(PAGE.read_text()):
            code = re.findall(r"`([^`]+)`", ours)
            if ours in WORDS or not code:
                assert ours in WORDS, f"{PAGE.name}: {ours!r} is neither code nor one of {sorted(WORDS)}"
                continue
            try:
                ran += run(section, code, folder)
            except Exception as e:
                raise AssertionError(f"{PAGE.name}, {section}: {ours}") from e
        os.chdir("/")
    assert ran >= 8, ran
    print(f"{ran} rows ran")


main()
