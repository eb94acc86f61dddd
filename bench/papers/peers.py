#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Peak against time on this processor: eager mode, a checkpoint around every block, torch.compile with activation budgets, and remat.

All contestants take one step per round, in rotating order, on `--threads` threads. A time is the median over rounds of (processor time
/ processor time of eager mode in the same round). Peaks do not count bytes held at the start of a step. Gradients exist before the step
and are zeroed in place. torch.compile needs a compiler.

    python bench/papers/peers.py [--models gpt2,unet] [--rounds 7] [-o papers]
"""
from __future__ import annotations

import argparse
import statistics
import types
from typing import Any, Callable

import tables  # noqa: I001  (finds step)
import step
import torch
from torch._functorch import config

import remat
from remat import _torch

NAMES = [name for name in step.WORKS if name != "gpt2 dropout"]
Contestant = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]  # (model, arguments of a step)
FRACTIONS = (1.0, 0.7, 0.5, 0.3)


def compiled(name: str, fraction: float) -> Contestant:
    """A model compiled with an activation budget, after one step."""
    model, inputs = step.make(name)
    plain = type(model).forward  # a code object of its own, or torch.compile would reuse a graph with another budget
    model.forward = types.MethodType(types.FunctionType(plain.__code__.replace(), plain.__globals__), model)
    made = torch.compile(model)
    with config.patch(activation_memory_budget=fraction):
        made(*inputs).backward()  # type: ignore[no-untyped-call]
    return made, inputs


def planned(name: str, fraction: float, eager: int) -> Contestant | None:
    """A model wrapped with an activation budget of `fraction` of eager's peak (bytes); None if no plan fits."""
    model, inputs = step.make(name)
    try:
        remat.wrap(model, inputs, planner=remat.Planner(activation_budget=int(fraction * eager), first_limit=20))
    except remat.OverBudget:
        return None
    return model, inputs


def measure(name: str, rounds: int) -> list[dict[str, object]]:
    contestants = {"eager": step.make(name), "checkpoint per block": step.make(name)}
    step.checkpointed(contestants["checkpoint per block"][0])
    eager = step.peak(*contestants["eager"])
    for f in FRACTIONS:
        contestants[f"torch.compile {f:g}"] = compiled(name, f)
    for f in (1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        found = planned(name, f, eager)
        if found is not None:
            contestants[f"remat {100 * f:.0f} %"] = found
    peaks = {who: step.peak(*it) for who, it in contestants.items()}
    times: dict[str, list[float]] = {who: [] for who in contestants}
    order = list(contestants)
    for k in range(rounds):
        for who in order[k % len(order):] + order[: k % len(order)]:
            times[who].append(step.step(*contestants[who])[0])
    return [{"who": who, "peak": peaks[who], "share": peaks[who] / peaks["eager"],
             "time": statistics.median(a / b for a, b in zip(times[who], times["eager"]))} for who in contestants]


def draw(axes: object, points: list[dict[str, object]]) -> None:
    for family, marker in (("eager", "s"), ("checkpoint", "D"), ("torch.compile", "^"), ("remat", "o")):
        own = [(100 * float(p["share"]), 100 * float(p["time"])) for p in points if str(p["who"]).startswith(family)]  # type: ignore[arg-type]
        axes.plot(*zip(*sorted(own)), marker=marker, label=family if family != "checkpoint" else "checkpoint per block")  # type: ignore[attr-defined]


def main(given: argparse.Namespace) -> None:
    torch.set_num_threads(given.threads)
    _torch.meter_install()
    table = tables.Table("peers", ["model", "contestant", "peak, MiB", "peak / eager", "processor time / eager"],
                         f"Measured on this processor, {given.threads} thread(s), {given.rounds} rounds in turns.")
    for name in given.models:
        points = measure(name, given.rounds)
        for p in points:
            table.row(name, p["who"], f"{p['peak'] / 2**20:.1f}", f"{p['share']:.3f}", f"{p['time']:.3f}")  # type: ignore[operator]
        table.details[name] = points
        table.save(given.output)
        tables.plotted(given.output / f"peers-{name.replace(' ', '-')}.svg", lambda axes: draw(axes, points), "peak memory, % of eager", "time, % of eager",
                       f"{name}: a training step on one processor")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)


if __name__ == "__main__":
    main(tables.options(__doc__, NAMES, arguments))
