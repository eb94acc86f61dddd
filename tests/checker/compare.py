#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares `evaluate` with independent checkers on random schedules.

usage: compare.py EMIT [COUNT [SEED]]
EMIT is the program of emit.cpp. REMAT_OTHER_CHECKER, or ../shared/tools/check_schedule.py next to the repository, names another
checker (a Python file with `check(problem, schedule) -> (peak, seconds)` that raises on an invalid schedule), used where it exists.
"""
import collections
import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

from check_schedule import Wrong, judge


# What `evaluate` says of a broken rule; random schedules must break each of them.
RULES = ("no such operation", "once-only", "is not on the device", "no such value", "no copy on the host", "the value is on the device",
         "allows no copies", "may not be copied", "the value is not on the device", "held value is dropped", "at the end")


def load_other():
    here = pathlib.Path(__file__).resolve()
    path = pathlib.Path(os.environ.get("REMAT_OTHER_CHECKER", here.parents[3] / "shared" / "tools" / "check_schedule.py"))
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("other_checker", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(a, b):
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


def main():
    emit, count, seed = sys.argv[1], *(sys.argv[2:] + ["4000", "1"][len(sys.argv) - 2:])
    other = load_other()
    valid = broken = copies = recomputed = 0
    rules = collections.Counter()
    lines = subprocess.run([emit, count, seed], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert len(lines) == int(count), f"{len(lines)} of {count} lines"
    for n, line in enumerate(lines):
        case = json.loads(line)
        problem, schedule, verdict = case["problem"], case["schedule"], case["verdict"]
        why = verdict.pop("why", "")
        rules[next((rule for rule in reversed(RULES) if rule in why), None)] += 1
        try:
            mine = judge(problem, schedule["steps"])
        except Wrong as why:
            mine = {"step": why.step}
        same = mine.keys() == verdict.keys() and all(close(mine[k], verdict[k]) for k in mine)
        if same and other and all(v.get("movable", True) for v in problem["values"]):  # it knows nothing of those
            try:
                peak, seconds = other.check(problem, schedule)
                same = peak == verdict.get("peak") and close(seconds, verdict["seconds"])
            except other.Invalid as why:
                mine = str(why)
                same = "step" in verdict
        if not same:
            sys.exit(f"case {n} of seed {seed}: evaluate says {verdict}, the checker {mine}\n{line}")
        valid += "peak" in verdict
        broken += "step" in verdict
        copies += "peak" in verdict and any(s[0] == "prefetch" for s in schedule["steps"])
        recomputed += verdict.get("recomputed", 0) > 0
    print(f"{valid} valid ({copies} with copies both ways, {recomputed} with recomputation) and {broken} broken schedules agree"
          + (", with the other checker too" if other else ""))
    if min(valid, broken, copies, recomputed) < int(count) // 20:
        sys.exit("too few cases of one kind")
    if rare := [rule for rule in RULES if rules[rule] < int(count) // 500]:
        sys.exit(f"rules that are hardly ever broken: {rare} of {dict(rules)}")


if __name__ == "__main__":
    main()
