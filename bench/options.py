#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows how sensitive plans are to the options of solvers: extra time and planning time with half and twice each value.

    python3 bench/options.py PROGRAM [--solvers min_cut rockmate] [--instances FILE...] [--budgets 65% 80%] [--time-limit 60]

PROGRAM is `build/remat`. Prints a table in Markdown with a row per numeric option: mean extra time in % of store-all's time, and mean
planning time (s) over all instances and budgets, for half the default, the default, and twice the default. "-": the option does not
allow the value, or a budget has no plan.
"""
import argparse
import json
import pathlib
import re
import subprocess
import tempfile
import time

INSTANCES = pathlib.Path(__file__).parent / "instances"


def options_of(program):
    """(solver, option, default, smallest, largest value) of each numeric option."""
    told = subprocess.run([program, "list", "--options"], capture_output=True, text=True, check=True).stdout
    solver = None
    for line in told.splitlines():
        if named := re.match(r"  (\S+)  +\S", line):
            solver = named[1]
        if option := re.match(r"      (\S+)=([\d.]+)  .*; (an integer|a number) from (\S+) to (\S+)$", line):
            name, value, kind, least, most = option.groups()
            yield solver, name, *((int if kind == "an integer" else float)(x) for x in (value, least, most))


def measure(program, solver, setting, cases, limit):
    """Mean extra time in % of store-all's time, and mean planning time in seconds; None if a budget has no plan."""
    extra, seconds = [], []
    for instance, budget, all_kept in cases:
        with tempfile.NamedTemporaryFile(suffix=".json") as plan:
            command = [program, "solve", str(instance), "--budget", budget, "--solver", solver, "--time-limit", str(limit), "-o", plan.name]
            before = time.perf_counter()
            done = subprocess.run([*command, *(["--option", setting] if setting else [])], capture_output=True, text=True)
            seconds.append(time.perf_counter() - before)
            if done.returncode != 0:
                return None
            extra.append(100 * (json.loads(pathlib.Path(plan.name).read_text())["seconds"] / all_kept - 1))
    return sum(extra) / len(extra), sum(seconds) / len(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--solvers", nargs="+", default=["min_cut", "rockmate", "hiremate"])
    parser.add_argument("--instances", nargs="+", type=pathlib.Path,
                        default=[INSTANCES / f"{name}.json" for name in ("gpt2-layers-2-seq-256", "resnet18", "unet-depth-4")])
    parser.add_argument("--budgets", nargs="+", default=["65%", "80%"])
    parser.add_argument("--time-limit", type=float, default=60)
    given = parser.parse_args()
    operations = {i: json.loads(i.read_text())["operations"] for i in given.instances}
    cases = [(i, budget, sum(o["seconds"] for o in operations[i])) for i in given.instances for budget in given.budgets]

    def cell(solver, setting):
        found = measure(given.program, solver, setting, cases, given.time_limit)
        return f"{found[0]:.2f}, {found[1]:.1f} s" if found else "-"

    print("| solver | option | value | half | as it is | twice |\n|---|---|---|---|---|---|")
    known = {}
    for solver, name, value, least, most in options_of(given.program):
        if solver not in given.solvers:
            continue
        if solver not in known:
            known[solver] = cell(solver, None)
        half, twice = type(value)(value / 2), value * 2
        cells = [cell(solver, f"{name}={x}") if least <= x <= most and x != value else "-" for x in (half, twice)]
        print(f"| `{solver}` | `{name}` | {value} | {cells[0]} | {known[solver]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
