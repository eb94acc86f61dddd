#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables of Rockmate and HiRemate: memory saved at 10 and 20 % extra time, planning time, and the proven bound.

Memory is activation memory in Rockmate's terms: the bytes beyond parameters, buffers, inputs and gradients, which all exist before the
step. 100 % is the activation memory of store-all.

    python bench/papers/rockmate.py [--models GPT-2,FNO] [--device rtx8000] [--measure] [-o papers]
"""
from __future__ import annotations

import argparse
import time

import models
import tables
from tables import percent

NAMES = ["GPT-2", "ResNet-101", "RegNet-32", "U-Net", "MLP-Mixer", "Transformer", "FNO", "U-FNO", "UNO"]
GOAL = 0.6  # share of activation memory to save at 10 % extra time


def verdict(at_goal: dict[str, float | None], operation: float) -> str:
    if operation > 1 - GOAL:
        return f"impossible: one operation takes {percent(operation)} %"
    extra, bound = at_goal["extra"], at_goal["bound"]
    if extra is not None and extra <= 0.10:
        return "met"
    if bound is not None and bound > 0.10:
        return f"impossible: at least {percent(bound)} %"
    return "no plan known" if extra is None else "open"


def computed(given: argparse.Namespace) -> None:
    table = tables.Table("rockmate", ["model", "operations", "activations, MiB", "saved at 10 %, %", "saved at 20 %, %", "60 % less: extra time, %",
                                      "proven bound, %", "goal", "capture + plan, s"],
                         f"Computed for {given.card.name}, by the roofline. Memory beyond parameters, buffers, inputs and gradients.")
    for name in given.models:
        problem, capture = tables.captured(name, given.card)
        begin = time.perf_counter()
        budgets = tables.Budgets(tables.accumulating(problem, given.card), given.seconds)
        goal = budgets.at(1 - GOAL)
        planning = capture + time.perf_counter() - begin
        saved = [1 - budgets.least(share) for share in (0.10, 0.20)]
        table.row(name, len(problem["operations"]), f"{budgets.activations / 2**20:.0f}", percent(saved[0]), percent(saved[1]), percent(goal["extra"]),
                  percent(goal["bound"]) if goal["status"] != "infeasible" else "-", verdict(goal, budgets.operation), f"{capture:.1f} + {planning - capture:.1f}")
        table.details[name] = sorted(budgets.found.values(), key=lambda r: -r["share"])
        table.save(given.output)

    def draw(axes: object) -> None:
        for name, points in table.details.items():
            known = [(100 * p["peak"], 100 * p["extra"]) for p in points if p["extra"] is not None and p["extra"] < 0.5]
            axes.plot(*zip(*sorted([(100.0, 0.0), *known])), marker=".", label=name)  # type: ignore[attr-defined]
        axes.axhline(10, color="gray", lw=0.8)  # type: ignore[attr-defined]
        axes.axvline(40, color="gray", lw=0.8)  # type: ignore[attr-defined]

    tables.plotted(given.output / "rockmate.svg", draw, "activation memory, % of a step without recomputation", "extra time, %", f"Computed for {given.card.name}")


def measured(given: argparse.Namespace) -> None:
    import statistics

    from step import step

    import remat
    from remat import _torch

    _torch.meter_install()
    table = tables.Table("rockmate-measured", ["model", "plan", "peak / eager", "planned extra time, %", "processor time / eager"],
                         "Measured on this processor, one thread. Peaks are beyond what is held; gradients exist before the step. Time is the median of ratios.")

    def trained(name: str) -> tuple[object, object]:
        model, args = models.build(name, "host")
        for p in model.parameters():
            p.grad = p.detach().clone().zero_()
        return model, args

    for name in given.models:
        plain = trained(name)
        fit = remat.fit(*models.build(name, "host"))
        contestants = {p.name: (trained(name), p) for p in fit.points if p.name.startswith("at most") and " 5 " not in p.name}
        for (model, args), point in contestants.values():
            remat.wrap(model, args, budget=point.peak, cache=False)
        everyone = [plain, *(c for c, _ in contestants.values())]
        peaks, ratios = [0] * len(everyone), [[] for _ in everyone]  # type: tuple[list[int], list[list[float]]]
        for turn in range(given.rounds + 2):
            seconds = []
            for k, (model, args) in enumerate(everyone):
                if k:
                    remat.of(model).release()
                took, peak = step(model, args)
                seconds.append(took)
                peaks[k] = max(peaks[k], peak) if turn else peak  # the first step measures kernels
            if turn >= 2:
                for k, took in enumerate(seconds):
                    ratios[k].append(took / seconds[0])
        for k, (what, (_, point)) in enumerate(contestants.items(), 1):
            table.row(name, what, f"{peaks[k] / peaks[0]:.3f}", percent(point.extra), f"{statistics.median(ratios[k]):.3f}")
        table.save(given.output)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="rtx8000", help="a name of remat.cards() (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="limit of each search (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="with --measure")


if __name__ == "__main__":
    asked = tables.options(__doc__, NAMES, arguments)
    measured(asked) if asked.measure else computed(asked)
