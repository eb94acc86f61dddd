#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gaps between plans and bounds of `automatic` on the models of this folder. No constant of the solvers was tuned on these models.

The steps are captured on `meta` for the rates of a card. Each cell is "bound / plan": extra times in % of the time of store-all. A
budget of N % is held + N % of (peak of store-all - held). "-": proven impossible. "none": no plan was found.

    python bench/papers/gaps.py --program build/remat [--models U-Net,FNO] [--device h100-sxm] [--seconds 20] [-o papers]
"""
from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import tempfile

import models
import tables

BUDGETS = ("80%", "60%", "40%", "30%", "20%")


def planned(program: pathlib.Path, problem: pathlib.Path, budget: str, seconds: float, plain: float) -> str:
    with tempfile.TemporaryDirectory() as folder:
        plan = pathlib.Path(folder, "plan.json")
        done = subprocess.run([program, "solve", problem, "--budget", budget, "--threads", "2", "--time-limit", str(seconds), "--gap", "0.001", "-o", plan],
                              capture_output=True, text=True)
        if done.returncode != 0:
            return "-" if "infeasible" in done.stdout else "none"
        found = json.loads(plan.read_text())
    return f"{100 * (found['bound'] / plain - 1):.2f} / {100 * (found['seconds'] / plain - 1):.2f}"


def computed(given: argparse.Namespace) -> None:
    if given.measure:
        tables.refuse("--measure has nothing to measure here: the table is about plans")
    if given.program is None or not given.program.is_file():
        tables.refuse(f"--program {given.program or ''} is no file: build it with `meson compile -C build`")
    table = tables.Table("gaps", ["model", "operations", *BUDGETS], f"Extra time in %, proven bound / plan. Computed for {given.card.name}, by the roofline.")
    for name in given.models:
        problem, _ = tables.captured(name, given.card)
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "step.json")
            file.write_text(json.dumps(problem))
            plain = tables.once(problem)["seconds"]
            table.row(name, len(problem["operations"]), *(planned(given.program, file, budget, given.seconds, plain) for budget in BUDGETS))
        table.save(given.output)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--program", type=pathlib.Path, help="build/remat")
    parser.add_argument("--device", default="h100-sxm", help="a name of remat.cards() (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of each search (default: %(default)s)")


if __name__ == "__main__":
    computed(tables.options(__doc__, list(models.WORKS), arguments))
