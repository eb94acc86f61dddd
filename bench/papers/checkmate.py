#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of Checkmate: the largest batch that trains in the memory of a card with an extra time of at most one forward.

The memory of a step counts parameters, buffers, inputs, activations and new gradients. There is no optimizer. The linear relaxation
with rounding has a time limit of `--seconds` per batch. It skips graphs of more than `--rounding` operations and prints "-" for them.

    python bench/papers/checkmate.py [--models VGG19,U-Net] [--device v100-sxm-16gb] [--measure] [-o papers]
"""
from __future__ import annotations

import argparse

import models
import tables

import remat

NAMES = ["VGG16", "VGG19", "MobileNet", "U-Net", "FCN8", "SegNet", "ResNet-50"]
METHODS = {"store all": "store_all", "per block": "recompute_all_blocks", "sqrt(n)": "chen", "LP rounding": "checkmate-rounding", "remat": "automatic"}
CLAIMED = {"VGG19": "167 / 197 / 266 / 289", "U-Net": "57", "FCN8": "57", "SegNet": "62", "ResNet-50": "193", "MobileNet": "1105"}


class Batches:
    """Problems by batch size. Bytes and seconds are affine in the batch size, so two captures determine all problems."""

    LOW, HIGH = 8, 16

    def __init__(self, name: str, card: remat.Card):
        self.low, self.high = (tables.captured(name, card, batch)[0] for batch in (self.LOW, self.HIGH))
        self.name, self.card = name, card

    def at(self, batch: int) -> tables.Problem:
        def between(a: float, b: float) -> float:
            return a + (b - a) * (batch - self.LOW) / (self.HIGH - self.LOW)

        def listed(what: str, bytes_of: str, seconds: bool) -> list[dict[str, object]]:
            found = []
            for a, b in zip(self.low[what], self.high[what], strict=True):
                entry = {**a, **({"seconds": between(a["seconds"], b["seconds"])} if seconds else {})}
                if bytes_of in a:
                    entry[bytes_of] = max(0, round(between(a[bytes_of], b.get(bytes_of, 0))))
                found.append(entry)
            return found

        return {**self.low, "values": listed("values", "bytes", False), "operations": listed("operations", "workspace", True)}

    def checked(self, batch: int) -> tables.Problem:
        """The problem of a batch size by capture, to check `at`."""
        return tables.captured(self.name, self.card, batch)[0]


def fits(problem: tables.Problem, memory: int, solver: str, seconds: float) -> bool:
    """True if a plan fits the memory (bytes) with an extra time of at most one forward."""
    plain = tables.once(problem)
    if plain["peak"] <= memory:
        return True
    if solver == "store_all":
        return False
    found = remat.solve(problem, memory, solver=solver, time_limit=seconds, gap=0.01)
    return bool(found["steps"]) and found["seconds"] - plain["seconds"] <= tables.forward_seconds(problem)


def computed(given: argparse.Namespace) -> None:
    table = tables.Table("checkmate", ["model", *METHODS, "remat / store all", "one forward, % of a step", "published"],
                         f"Largest batch, computed for {given.card.name} with {given.card.memory} bytes, by the roofline.")
    for name in given.models:
        batches = Batches(name, given.card)
        found: dict[str, int | None] = {}
        for method, solver in METHODS.items():
            if solver == "checkmate-rounding" and len(batches.low["operations"]) > given.rounding:
                found[method] = None
                continue
            low = found.get("store all") or 0  # no method is worse than store-all
            high = 2 * low or 2
            while fits(batches.at(high), given.card.memory, solver, given.seconds):
                low, high = high, 2 * high
            while high - low > max(1, low // 100):
                middle = (low + high) // 2
                if fits(batches.at(middle), given.card.memory, solver, given.seconds):
                    low = middle
                else:
                    high = middle
            found[method] = low
        best = found["remat"] or 1
        step = batches.checked(best)
        if best > 1 and not fits(step, given.card.memory, METHODS["remat"], 5 * given.seconds):
            tables.refuse(f"{name}: batch {best} does not fit when it is captured itself")
        share = tables.forward_seconds(step) / tables.once(step)["seconds"]
        ratio = (found["remat"] or 0) / max(1, found["store all"] or 0)
        table.row(name, *("-" if b is None else b for b in found.values()), f"{ratio:.1f}", tables.percent(share), CLAIMED.get(name, ""))
        table.details[name] = found
        table.save(given.output)

    def draw(axes: object) -> None:
        names, methods = list(table.details), list(METHODS)
        for k, method in enumerate(methods):
            heights = [(table.details[n][method] or 0) / max(1, table.details[n]["store all"]) for n in names]
            axes.bar([i + (k - 2) * 0.17 for i in range(len(names))], heights, 0.17, label=method)  # type: ignore[attr-defined]
        axes.set_xticks(range(len(names)), names, fontsize=8)  # type: ignore[attr-defined]

    tables.plotted(given.output / "checkmate.svg", draw, "", "largest batch / store all", f"{given.card.name}, at most one extra forward")


def measured(given: argparse.Namespace) -> None:
    """Trains the batch that `remat.largest` finds for a small budget on this processor, and measures its peak."""
    table = tables.Table("checkmate-measured", ["model", "budget, MiB", "largest batch", "measured peak / budget"],
                         "On this processor, one thread, at most a third of extra time. Peaks are with all that is held.")
    for name in given.models:
        model, args = models.build(name, "host", batch=1)
        budget = 2 * remat.fit(model, args).eager_peak

        def batch(n: int) -> tuple[object, ...]:
            return models.inputs(name, "host", batch=n)

        best = remat.largest(batch, model, budget=budget, values=range(1, 65), extra=1 / 3)
        model, args = models.build(name, "host", batch=best)
        remat.wrap(model, args, budget=budget, cache=False)
        for turn in range(2):
            remat.of(model).reset_peak()
            for p in model.parameters():
                p.grad = None
            model(*args).backward()
        table.row(name, f"{budget / 2**20:.0f}", int(best), f"{remat.of(model).memory()['peak'] / budget:.3f}")
        table.save(given.output)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="v100-sxm-16gb", help="a name of remat.cards() (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="limit of each search (default: %(default)s)")
    parser.add_argument("--rounding", type=int, default=150, help="operations of a graph for LP rounding (default: %(default)s)")


if __name__ == "__main__":
    asked = tables.options(__doc__, NAMES, arguments)
    measured(asked) if asked.measure else computed(asked)
