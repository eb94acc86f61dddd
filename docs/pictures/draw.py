#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the documentation from plans: memory over time, the bound on ten operations, and one schedule per solver.
Also writes the problems that the pages on solvers use.

usage: PYTHONPATH=build/adapters/python .venv/bin/python docs/pictures/draw.py [NAME...]: all pictures, or those
"""
from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import remat

HERE = pathlib.Path(__file__).parent
STYLE = """<style>text{font:13px Helvetica,Arial,sans-serif;fill:#333}.small{font-size:11px}.mid{text-anchor:middle}.end{text-anchor:end}
.axis{stroke:#888;fill:none}.a{fill:#9aa7b5}.b{fill:#2a6fbb}.c{fill:#d9730d}.d{fill:#4c9a5b}.soft{fill-opacity:.35}
.la{stroke:#8794a3}.lb{stroke:#2a6fbb}.lc{stroke:#c0392b}.line{fill:none;stroke-width:1.8}.dash{stroke-dasharray:5 4}
@media(prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#777}.b{fill:#6aa9e9}.lb{stroke:#6aa9e9}.lc{stroke:#ff7b6b}}</style>"""
TEN_SECONDS = [1.0] * 5 + [2.0] * 5


def ten() -> dict[str, Any]:
    """Five operations forward and five backward; backward operation g_i reads the input of f_i and the gradient of its output."""
    values = [{"name": "x", "bytes": 1, "held": True}]
    operations = []
    for i in range(1, 6):
        values.append({"name": f"a{i}", "bytes": 1})
        operations.append({"name": f"f{i}", "inputs": [i - 1], "outputs": [i], "seconds": 1.0})
    for i in range(5, 0, -1):
        values.append({"name": f"d{i - 1}", "bytes": 1})
        operations.append({"name": f"g{i}", "inputs": [i - 1, len(values) - 2], "outputs": [len(values) - 1], "seconds": 2.0})
    return {"format": "remat-problem", "version": 1, "name": "ten operations", "values": values, "operations": operations,
            "targets": [10], "backward_start": 5}


def chain(layers: int = 12, copies: bool = False) -> dict[str, Any]:
    """A chain like `ten`, with uneven sizes and times, and with copies to the host where asked for."""
    values = [{"name": "x", "bytes": 40, "held": True}]
    operations = []
    for i in range(1, layers + 1):
        values.append({"name": f"a{i}", "bytes": 60 + 40 * (i % 3)})
        operations.append({"name": f"f{i}", "inputs": [i - 1], "outputs": [i], "seconds": 1.0 + 0.5 * (i % 2)})
    for i in range(layers, 0, -1):
        values.append({"name": f"d{i - 1}", "bytes": values[i - 1]["bytes"]})
        operations.append({"name": f"g{i}", "inputs": sorted({i - 1, i, len(values) - 2}), "outputs": [len(values) - 1],
                           "seconds": 2 + (i % 2)})
    problem = {"format": "remat-problem", "version": 1, "name": f"chain of {layers}", "values": values, "operations": operations,
               "targets": [2 * layers], "backward_start": layers}
    return problem | ({"offload": {"to_host": 40.0, "to_device": 40.0, "latency": 0.0}} if copies else {})


def document(width: int, height: int, body: list[str]) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">{STYLE}\n' + "\n".join(body) + "\n</svg>\n"


def scale(start: float, length: float, whole: float) -> Callable[[float], float]:
    """Where a value is drawn: 0 at `start`, `whole` after `length`."""
    return lambda value: start + length * value / whole


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{words}</text>'


def profile(problem: dict[str, Any], schedule: dict[str, Any]) -> list[tuple[float, float, int]]:
    """(begin, end, bytes) of each computation, waits for copies left out."""
    clock, found = 0.0, []
    for step, memory in zip(schedule["steps"], remat.evaluate(problem, schedule)["memory"]):
        if step[0] == "compute":
            seconds = problem["operations"][step[1]]["seconds"]
            found.append((clock, clock + seconds, memory))
            clock += seconds
    return found


def steps(found: list[tuple[float, float, int]], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    return "M" + " L".join(f"{x(t):.1f} {y(m):.1f}" for begin, end, m in found for t in (begin, end))


def memory() -> str:
    """Memory over time of GPT-2, plain and planned."""
    problem = json.loads((HERE.parents[1] / "bench/instances/gpt2-layers-12.json").read_text())
    plain = remat.solve(problem, "100%", solver="store_all")
    planned = remat.solve(problem, "50%", time_limit=10, gap=0.002)
    before, after = profile(problem, plain), profile(problem, planned)
    x, y = scale(70, 640, after[-1][1]), scale(270, -220, plain["peak"])
    body = [f'<path class="axis" d="M70 40V270H720"/>', f'<path class="line la" d="{steps(before, x, y)}"/>', f'<path class="line lb" d="{steps(after, x, y)}"/>',
            f'<path class="line lc dash" d="M70 {y(planned["budget"]):.1f}H720"/>', text(80, y(planned["budget"]) - 7, f'budget {planned["budget"] / 2**30:.2f} GiB', "small"),
            text(x(before[-1][1] * .36), y(plain["peak"]) - 6, f'plain: {plain["peak"] / 2**30:.2f} GiB', "mid"),
            text(x(after[-1][1] * .46), 252, f'planned: {planned["peak"] / 2**30:.2f} GiB, {100 * (planned["seconds"] / plain["seconds"] - 1):.1f} % more time', "mid"),
            text(395, 292, "time of one training step", "mid small"), text(62, 54, "memory", "end small"), text(62, 274, "0", "end small")]
    return document(740, 304, body)


def curve() -> str:
    """Extra time against budget of the same model, with the proven bound."""
    problem = json.loads((HERE.parents[1] / "bench/instances/gpt2-layers-12.json").read_text())
    plain = remat.solve(problem, "100%", solver="store_all")["seconds"]
    shares = [20, 25, 30, 35, 40, 50, 60, 70, 80, 90, 100]
    plans = [remat.solve(problem, f"{share}%", time_limit=3, gap=0.002) for share in shares]
    x, y = scale(70 - 640 * 15 / 85, 640, 85), scale(250, -7.5, 1)

    def line(key: str) -> str:
        return "M" + " L".join(f"{x(s):.1f} {y(100 * (p[key] / plain - 1)):.1f}" for s, p in zip(shares, plans))

    body = ['<path class="axis" d="M70 40V250H720"/>', f'<path class="line lb" d="{line("seconds")}"/>', f'<path class="line lc dash" d="{line("bound")}"/>']
    body += [text(x(s), 268, f"{s} %", "mid small") for s in (20, 40, 60, 80, 100)] + [text(62, y(e) + 4, f"{e} %", "end small") for e in (0, 10, 20)]
    body += [text(395, 288, "budget, as a share of the activations", "mid small"), text(80, 44, "extra time", "small"),
             text(x(46), y(16), "plan (solid) and proven bound (dashed)")]
    return document(740, 300, body)


def bound() -> str:
    """The moment before g5 on ten operations: what must be kept or made again."""
    body = [text(20, 24, "Before g5 runs for the first time, budget 5: x, a4, a5 and d4 take 4, one place is left for a1, a2 and a3")]
    at = scale(60, 108, 1)
    for i in range(6):
        kind = "a" if i == 0 else "d" if i in (4, 5) else "b" if i == 3 else "c"
        body += [f'<rect class="{kind}" x="{at(i) - 24}" y="48" width="48" height="34" rx="4"/>', text(at(i), 70, "x" if i == 0 else f"a{i}", "mid")]
        if i:
            body += [f'<path class="axis" d="M{at(i - 1) + 24} 65H{at(i) - 26}l-6 -4m6 4l-6 4"/>', text((at(i - 1) + at(i)) / 2, 58, f"f{i}: 1 s", "mid small")]
            body += [f'<path class="axis" d="M{at(i - 1)} 82V126m-4 -6l4 6l4 -6"/>']
        body += [f'<rect class="a soft" x="{at(i) - 24}" y="128" width="48" height="34" rx="4"/>', text(at(i), 150, f"d{i}" if i < 5 else "= a5", "mid")]
        if i:
            body += [f'<path class="axis" d="M{at(i) - 24} 145H{at(i - 1) + 26:.0f}l6 -4m-6 4l6 4"/>', text((at(i - 1) + at(i)) / 2, 138, f"g{i}: 2 s", "mid small")]
    for place, (kind, words) in enumerate([("d", "needed by g5 now"), ("b", "kept"), ("c", "made again: 1 s each"), ("a", "input, always there")]):
        body += [f'<rect class="{kind}" x="{60 + 160 * place}" y="184" width="14" height="14"/>', text(80 + 160 * place, 196, words, "small")]
    return document(700, 210, body)


def gantt(solver: str, budget: str, copies: bool) -> str:
    """What `solver` does on the chain: operations over time, repeated ones in another colour, and memory below."""
    problem = chain(copies=copies)
    plan = remat.solve(problem, budget, solver=solver, time_limit=10)
    if plan["status"] not in ("optimal", "feasible"):
        raise SystemExit(f"{solver}: {plan['status']} {plan.get('reason', '')}")
    plain = remat.solve(problem, "100%", solver="store_all")
    rows = len(problem["operations"])
    checked = remat.evaluate(problem, plan)
    end = max(checked["seconds"], plan["seconds"])
    x, y, row = scale(60, 640, end), scale(312, -90, plain["peak"]), scale(14, 180, rows)
    body, seen, clock = ['<path class="axis" d="M60 12V196H704M60 216V312H704"/>'], set[int](), 0.0
    found: list[tuple[float, float, int]] = []
    for step, bytes_ in zip(plan["steps"], checked["memory"]):
        if step[0] == "compute":
            o, seconds = step[1], problem["operations"][step[1]]["seconds"]
            body.append(f'<rect class="{"c" if o in seen else "b"}" x="{x(clock):.1f}" y="{row(o):.1f}" width="{max(x(seconds) - x(0) - 1, 1):.1f}" height="{180 / rows - 2:.1f}"/>')
            seen.add(o)
            found.append((clock, clock + seconds, bytes_))
            clock += seconds
        elif step[0] in ("offload", "prefetch"):
            maker = next(o for o, op in enumerate(problem["operations"]) if step[1] in op["outputs"])
            body.append(f'<circle class="d" cx="{x(clock):.1f}" cy="{row(maker) + 4:.1f}" r="4"/>')
    body += [f'<path class="line lb" d="{steps(found, x, y)}"/>', f'<path class="line lc dash" d="M60 {y(plan["budget"]):.1f}H704"/>',
             text(54, 24, "forward", "end small"), text(54, 190, "backward", "end small"), text(54, 262, "memory", "end small"),
             text(382, 332, f'{checked["recomputed"]} of {len(found)} computations are repeated (orange); '
                  + ("a dot begins a copy; " if copies else "") + f'{100 * (plan["seconds"] / plain["seconds"] - 1):.1f} % extra time', "mid small")]
    return document(720, 344, body)


#: Budget, and whether the chain allows copies.
SOLVERS = {name: ("45%", False) for name in ("revolve", "rotor", "twremat", "checkmate", "checkmate-rounding", "rockmate", "hiremate", "min_cut",
                                            "improved", "moments", "automatic")}
SOLVERS |= {name: ("45%", True) for name in ("offmate", "offload_only", "pofo", "poet")}
SOLVERS |= {"store_all": ("100%", False), "recompute_all_blocks": ("75%", False), "chen": ("50%", False)}

if __name__ == "__main__":
    pictures: dict[str, Callable[[], str]] = {"memory": memory, "curve": curve, "bound": bound}
    pictures |= {f"solver-{name}": functools.partial(gantt, name, *SOLVERS[name]) for name in SOLVERS}
    for name, copies in (("chain", False), ("chain-with-copies", True)):
        (HERE.parent / f"snippets/{name}.json").write_text(json.dumps(chain(copies=copies), indent=1) + "\n")
    for name in sys.argv[1:] or pictures:
        (HERE / f"{name}.svg").write_text(pictures[name]())
        print(name)
