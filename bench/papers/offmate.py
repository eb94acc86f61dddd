#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of OffMate: steps with AdamW whose weights and optimizer states move between a card and its host.

The step is captured on `meta`, in bfloat16. `bench_offload` (bench/offload.cpp) then adds an AdamW update per weight, allows weights and
states to move, and plans recomputation and all copies together. 100 % is a step with everything on the card. "host" updates weights on
the host, "device" on the card. Memory counts weights, states, gradients and activations. `--rate` is the rate of the link in each
direction. All numbers are computed; nothing ran on the card. With --measure, `bench/offmate.py` measures steps on an emulated device.

    python bench/papers/offmate.py --bench-offload build/bench/bench_offload [--models Llama-like] [--device a100-sxm-40gb] [-o papers]
"""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import models
import tables
import torch

NAMES = ["Llama-like", "Phi-like", "Bloom-like", "Mistral-like"]
SHARES = (0.5, 0.3, 0.2, 0.1, 0.05)


def planned(program: pathlib.Path, file: pathlib.Path, kind: str, link: float, seconds: float) -> list[tuple[float | None, float | None]]:
    """Per share of memory: (proven bound, plan), as extra time in per cent. None: no bound, or no plan."""
    told = subprocess.run([program, file, "--weights", kind, "--anywhere", "--joint", "-r", f"{link:.4f}", "-b", ",".join(map(str, SHARES)), "-t", str(seconds)],
                          check=True, capture_output=True, text=True).stdout
    cells = [cell.strip() for cell in told.splitlines()[-1].strip("| ").split("|")][2:]
    pairs = [cell.split(" / ") for cell in cells]
    return [(None if bound == "-" else float(bound), None if plan == "-" else float(plan)) for bound, plan in pairs]


def computed(given: argparse.Namespace) -> None:
    if given.bench_offload is None or not given.bench_offload.is_file():
        tables.refuse(f"--bench-offload {given.bench_offload or ''} is no file: build it with `meson compile -C build benches`")
    columns = [f"{100 * share:.0f} % of memory" for share in SHARES]
    table = tables.Table("offmate", ["model", "parameters, 10^9", "AdamW on", "link / step", *columns],
                         f"Extra time in %, proven bound / plan. Computed for {given.card.name} with {given.rate / 1e9:.0f} GB/s each way, by the roofline.")
    torch.set_default_dtype(torch.bfloat16)
    for name in given.models:
        model, args = models.build(name, "paper", device="meta")
        parameters = sum(p.numel() for p in model.parameters())
        problem, _ = tables.problem_of(model, args, given.card)
        plain = tables.once(problem)
        link = 2 * (plain["peak"] - tables.held(problem)) / given.rate / plain["seconds"]
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "step.json")
            file.write_text(json.dumps({**problem, "values": [{k: x for k, x in v.items() if k != "movable"} for v in problem["values"]]}))
            for kind in ("host", "device"):
                cells = planned(given.bench_offload, file, kind, link, given.seconds)
                table.row(name, f"{parameters / 1e9:.2f}", kind, f"{link:.2f}",
                          *(f"{'-' if bound is None else bound} / {'-' if plan is None else plan}" for bound, plan in cells))
                table.details[f"{name}, {kind}"] = [{"share": s, "bound": b, "extra": p} for s, (b, p) in zip(SHARES, cells)]
                table.save(given.output)

    def draw(axes: object) -> None:
        for what, points in table.details.items():
            known = [(100 * p["share"], p["extra"]) for p in points if p["extra"] is not None]
            if known:
                axes.plot(*zip(*known), marker=".", ls="--" if what.endswith("device") else "-", label=f"{what}")  # type: ignore[attr-defined]
        axes.set_xscale("log")  # type: ignore[attr-defined]

    tables.plotted(given.output / "offmate.svg", draw, "memory, % of a step with everything on the card", "extra time, %", f"AdamW, {given.card.name}")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="a100-sxm-40gb", help="a name of remat.cards() (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=24e9, help="bytes per second of the link, each way (default: PCIe 4.0 x16, %(default).0f)")
    parser.add_argument("--seconds", type=float, default=10.0, help="limit of each search (default: %(default)s)")
    parser.add_argument("--bench-offload", type=pathlib.Path, help="the built program")


if __name__ == "__main__":
    asked = tables.options(__doc__, NAMES, arguments)
    if asked.measure:
        if "REMAT_TEST_DEVICE" not in os.environ:
            tables.refuse("--measure needs the emulated device: set REMAT_TEST_DEVICE as the tests do (adapters/python/tests/meson.build)")
        sys.exit(subprocess.call([sys.executable, pathlib.Path(__file__).parents[1] / "offmate.py"]))
    computed(asked)
