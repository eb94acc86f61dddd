# SPDX-License-Identifier: Apache-2.0
"""Shared code of the scripts in this folder: problems of models, searches over budgets, and files for tables and plots."""
from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any, Callable, Iterable

import models

import remat

Problem = dict[str, Any]


def captured(name: str, card: remat.Card, batch: int | None = None) -> tuple[Problem, float]:
    """Captures a training step of size `paper` on `meta`. Returns (problem, seconds of the capture without building the model)."""
    model, args = models.build(name, "paper", device="meta", batch=batch)
    return problem_of(model, args, card)


def problem_of(model: Any, args: Any, card: remat.Card) -> tuple[Problem, float]:
    begin = time.perf_counter()
    plan = remat.plan(model, args, device=card.roofline, time_limit=0)
    problem: Problem = json.loads(plan.document())["problem_document"]
    return problem, time.perf_counter() - begin


def held(problem: Problem) -> int:
    """Bytes of parameters, buffers and inputs."""
    return sum(v["bytes"] for v in problem["values"] if v.get("held"))


def accumulating(problem: Problem, card: remat.Card) -> Problem:
    """The problem of a step whose gradients exist before it. Each new gradient is added to the old gradient at once and freed."""
    assert card.roofline is not None
    values = list(problem["values"])
    operations: list[dict[str, Any]] = []
    targets: list[int] = []
    wanted = set(problem["targets"])
    start = problem.get("backward_start")
    for i, operation in enumerate(problem["operations"]):
        if i == start:
            start = len(operations)
        operations.append(operation)
        for made in operation["outputs"]:
            if made in wanted:
                wanted.remove(made)
                targets.append(len(values))
                operations.append({"name": "accumulate", "inputs": [made], "outputs": [len(values)],
                                   "seconds": 3 * values[made]["bytes"] / card.roofline.bytes_per_second})
                values.append({"name": f"accumulated {made}", "bytes": 0})
    changed = {**problem, "values": values, "operations": operations, "targets": [*sorted(wanted), *targets]}
    return changed if start is None else {**changed, "backward_start": start}


def forward_seconds(problem: Problem) -> float:
    return float(sum(o["seconds"] for o in problem["operations"][: problem["backward_start"]]))


def once(problem: Problem) -> dict[str, Any]:
    """The schedule store-all, with its peak (bytes) and its time (s)."""
    plan: dict[str, Any] = remat.solve(problem, 1 << 52, solver="store_all")
    return plan


def working_set(problem: Problem, operation: dict[str, Any]) -> int:
    """Bytes of the values that an operation reads and writes, without held values, plus its workspace. In-place results count 0 bytes."""
    values, in_place = problem["values"], {pair[0] for pair in operation.get("overwrites", [])}
    touched = {*operation["inputs"], *operation["outputs"]} - in_place
    return int(sum(values[v]["bytes"] for v in touched if not values[v].get("held")) + operation.get("workspace", 0))


class Budgets:
    """Plans of a problem for budgets that are shares of its activations (peak of store-all - held bytes)."""

    def __init__(self, problem: Problem, time_limit: float):
        self.problem, self.time_limit = problem, time_limit
        self.plain = once(problem)
        self.held = held(problem)
        self.activations = self.plain["peak"] - self.held
        #: largest working set of an operation, as a share: no plan needs less
        self.operation = max(working_set(problem, o) for o in problem["operations"]) / self.activations
        self.found: dict[float, dict[str, Any]] = {}

    def at(self, share: float) -> dict[str, Any]:
        """Plans for a share. `peak`: share of the activations. `extra` time, proven `bound`: shares of store-all's time. `elapsed`: seconds."""
        share = round(share, 4)
        if share not in self.found:
            begin = time.perf_counter()
            r = remat.solve(self.problem, self.held + int(share * self.activations), time_limit=self.time_limit, gap=0.002)
            known = bool(r["steps"])
            self.found[share] = {"share": share, "status": r["status"], "elapsed": time.perf_counter() - begin,
                                 "peak": (r["peak"] - self.held) / self.activations if known else None,
                                 "extra": self._extra(r["seconds"]) if known else None,
                                 "bound": self._extra(r["bound"]) if r.get("bound") is not None else None}
        return self.found[share]

    def _extra(self, seconds: float) -> float:
        return max(0.0, float(seconds) / float(self.plain["seconds"]) - 1)

    def least(self, extra: float, steps: int = 5) -> float:
        """The smallest peak found, as a share, with an extra time of at most `extra`."""
        high = min((s for s, r in self.found.items() if r["extra"] is not None and r["extra"] <= extra), default=1.0)
        low = max((s for s in self.found if s < high), default=0.0)
        for _ in range(steps):
            middle = (low + high) / 2
            r = self.at(middle)
            if r["extra"] is not None and r["extra"] <= extra:
                high = middle
            else:
                low = middle
        return min((r["peak"] for r in self.found.values() if r["extra"] is not None and r["extra"] <= extra), default=1.0)


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}"


class Table:
    """A table in Markdown. `row` prints a row at once; `save` writes all rows as Markdown and JSON."""

    def __init__(self, name: str, columns: Iterable[str], about: str):
        self.name, self.columns, self.about = name, list(columns), about
        self.rows: list[dict[str, Any]] = []
        self.details: dict[str, Any] = {}
        self.lines = ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        print(f"{about}\n\n" + "\n".join(self.lines), flush=True)

    def row(self, *cells: Any) -> None:
        self.rows.append(dict(zip(self.columns, cells, strict=True)))
        self.lines.append("| " + " | ".join(map(str, cells)) + " |")
        print(self.lines[-1], flush=True)

    def save(self, folder: pathlib.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(f"{self.about}\n\n" + "\n".join(self.lines) + "\n", encoding="utf-8")
        told = {"about": self.about, "rows": self.rows, "details": self.details}
        (folder / f"{self.name}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def plotted(path: pathlib.Path, draw: Callable[[Any], None], x: str, y: str, title: str) -> None:
    """Writes a plot as an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "remat"  # reproducible files
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    draw(axes)
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def options(about: str | None, names: list[str], more: Callable[[argparse.ArgumentParser], None] = lambda parser: None) -> argparse.Namespace:
    """Parses the command line. Exits with status 2 and one sentence for an unknown model or device."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(names), help="names, separated by commas")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=pathlib.Path("papers"), help="folder for tables and plots (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help="measure on this processor, at smaller sizes")
    more(parser)
    given = parser.parse_args()
    given.models = given.models.split(",")
    for name in given.models:
        if name not in names:
            refuse(f"model {name!r} is not in this table; it has {', '.join(names)}")
    if "device" in given:
        try:
            given.card = remat.card(given.device)
        except ValueError as e:
            refuse(str(e))
    return given


def refuse(why: str) -> None:
    print(f"{pathlib.Path(sys.argv[0]).name}: {why}", file=sys.stderr)
    sys.exit(2)
