#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares `evaluate` with independent checkers on random schedules of both versions of the formats.

usage: compare.py EMIT [COUNT [SEED]]
EMIT is the program of emit.cpp. A third checker is used for version 1 if REMAT_OTHER_CHECKER, or
../shared/tools/check_schedule.py next to the repository, names one: a Python file with `check(problem, schedule) -> (peak,
seconds)` that raises on an invalid schedule.
"""
import collections
import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import check_schedule
import check_tiers
from check_schedule import Wrong

# Parts of the messages of `evaluate`, one for each rule. The random schedules must break each rule.
RULES = ("no such operation", "once-only", "is not on the device", "no such value", "no copy on the host", "the value is on the device",
         "allows no copies", "may not be copied", "the value is not on the device", "held value is dropped", "at the end")
TIER_RULES = ("no such operation", "no such value", "once-only", "input", "overwrites its inputs is computed again", "the value is on",
              "the value is not on", "no link", "may not be copied", "held value", "needs", "may start on any tier", "starts twice", "no source that may start",
              "at the end", "at the end of the step", "as the next step begins")


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
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


def cases(emit, count, seed, *mode):
    lines = subprocess.run([emit, count, seed, *mode], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert len(lines) == int(count), f"{len(lines)} of {count} lines"
    for n, line in enumerate(lines):
        case = json.loads(line)
        why = case["verdict"].pop("why", "")

        def differ(other, n=n, line=line, verdict=case["verdict"]):
            sys.exit(f"case {n} of seed {seed}: evaluate says {verdict} {why}, the checker {other}\n{line}")
        yield case["problem"], case["schedule"], case["verdict"], why, differ


def verdict_of(judge, *arguments):
    try:
        return judge(*arguments)
    except Wrong as why:
        return {"step": why.step}


def enough(count, kinds, rules, broken):
    if rare := [kind for kind, n in kinds.items() if n < int(count) // 20]:
        sys.exit(f"too few cases of a kind: {rare}")
    if rare := [rule for rule in rules if broken[rule] < int(count) // 500]:
        sys.exit(f"rules that are hardly ever broken: {rare} of {dict(broken)}")


def plain(emit, count, seed):
    """Schedules of version 1. Version 2 has the same rules for them, but forbids copies to a tier that has the value."""
    other = load_other()
    kinds, rules = collections.Counter(), collections.Counter()
    for problem, schedule, verdict, why, differ in cases(emit, count, seed):
        rules[next((rule for rule in reversed(RULES) if rule in why), None)] += 1
        sent = [v for what, v in schedule["steps"] if what == "offload"]
        second = verdict_of(check_tiers.judge, problem, schedule)
        if not close(second, verdict) and len(sent) == len(set(sent)):
            differ(second)
        verdict.pop("peaks", None)
        mine = verdict_of(lambda p, s: check_schedule.judge(p, s["steps"]), problem, schedule)
        if not close(mine, verdict):
            differ(mine)
        if other and all(v.get("movable", True) for v in problem["values"]):  # it does not know values that may not be copied
            try:
                peak, seconds = other.check(problem, schedule)
                if peak != verdict.get("peak") or not close(seconds, verdict["seconds"]):
                    differ((peak, seconds))
            except other.Invalid as fault:
                if "step" not in verdict:
                    differ(str(fault))
        valid = "peak" in verdict
        kinds.update(valid=valid, broken=not valid, copies=valid and any(s[0] == "prefetch" for s in schedule["steps"]),
                     recomputed=verdict.get("recomputed", 0) > 0, again=len(sent) == len(set(sent)))
    print("version 1: {valid} valid ({copies} with copies both ways, {recomputed} with recomputation) and {broken} broken schedules agree"
          .format(**kinds) + (", with the other checker too" if other else ""))
    enough(count, kinds, RULES, rules)


def tiers(emit, count, seed):
    kinds, rules = collections.Counter(), collections.Counter()
    for problem, schedule, verdict, why, differ in cases(emit, count, seed, "tiers"):
        rules[next((rule for rule in reversed(TIER_RULES) if rule in why), None)] += 1
        mine = verdict_of(check_tiers.judge, problem, schedule, 10)
        later = mine.pop("later", None)
        if not close(mine, verdict):
            differ(mine)
        if later is not None and not math.isclose(later, verdict["seconds"], rel_tol=1e-9):
            differ(f"{later} s after ten more steps")
        valid = "peak" in verdict
        kinds.update(valid=valid, broken=not valid, cyclic=valid and "next" in problem, exact=later is not None,
                     elsewhere=valid and any("on" in o for o in problem["operations"]),
                     in_place=valid and any("overwrites" in o for o in problem["operations"]),
                     copies=valid and any(s[0] in ("copy", "prefetch") for s in schedule["steps"]))
    print("version 2: {valid} valid ({cyclic} cyclic, {exact} with a period that stays; {elsewhere} with operations elsewhere, {in_place} in place, "
          "{copies} with copies) and {broken} broken schedules agree".format(**kinds))
    enough(count, kinds, TIER_RULES, rules)


def main():
    emit, count, seed = sys.argv[1], *(sys.argv[2:] + ["4000", "1"][len(sys.argv) - 2:])
    plain(emit, count, seed)
    tiers(emit, count, seed)


if __name__ == "__main__":
    main()
