# SPDX-License-Identifier: Apache-2.0
"""The first ten minutes on a GPU: is remat correct on it, does it keep its budgets, and is it fast?

    devices    the device, its driver, memory, versions
    suites     the test suites for devices, in Python and, if they are built, in C++
    bits       six models train to the same bits with and without remat
    memory     measured peaks against budgets; reserved memory against planned memory
    speed      step times of eager mode, block checkpointing, torch.compile and remat
    finetune   full training of a model of 3 billion parameters in a quarter of the bytes of its weights, gradients and states

Prints one table and writes a JSON file. The exit code is 1 if there is no usable device or a row failed.
Each part has a share of --minutes. Unused time goes to the next parts. Building and installing are not included.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

import build
from parts import PARTS, Runner
from report import FAILED, NOT_AVAILABLE, NOT_JUDGED, PASSED, say, table


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="for all parts together (default: 10)")
    parser.add_argument("--device", default="", help="such as cuda:1 (default: the first usable accelerator)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes of all models, for emulated devices")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--json", default="gpu-check.json", metavar="FILE", help="where results go (default: gpu-check.json)")
    parser.add_argument("--wheel", metavar="FILE", help="a wheel of remat to install, in place of a build")
    parser.add_argument("--built", metavar="FOLDER", help="a build folder to use as it is, in place of a build")
    parser.add_argument("--python", metavar="FILE", help="the Python with torch (default: .venv/bin/python)")
    options = parser.parse_args(given)
    options.parts = options.parts.split(",")
    options.parts.sort(key=lambda part: list(PARTS).index(part) if part in PARTS else -1)
    if wrong := [part for part in options.parts if part not in PARTS]:
        parser.error(f"there is no part {wrong[0]}: parts are {', '.join(PARTS)}")
    if options.wheel and options.built:
        parser.error("give --wheel or --built, not both")
    return options


def main() -> int:
    options = arguments()
    try:
        package = build.prepare(options)
    except build.Failed as e:
        say(f"gpu-check: {e}")
        return 1
    begin = time.monotonic()
    runner = Runner(package, options)
    problem = runner.find_device()
    if not problem:
        say(f"gpu-check: on {runner.device} ({runner.name})")
        for part in options.parts:
            if part != "devices":
                runner.run(part, [p for p in options.parts if p != "devices"])
    counts = {verdict: sum(row["verdict"] == verdict for row in runner.rows) for verdict in (PASSED, FAILED, NOT_AVAILABLE, NOT_JUDGED)}
    pathlib.Path(options.json).write_text(json.dumps(
        {"device": runner.device, "name": runner.name, "emulated": runner.emulated, "tiny": options.tiny, "problem": problem, "versions": runner.versions,
         "devices": runner.found, "seconds": round(time.monotonic() - begin, 1), "counts": counts, "rows": runner.rows}, indent=1) + "\n")
    if problem:
        say(f"gpu-check: {problem}")
        return 1
    print(table(runner.rows))
    print(f"gpu-check: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}, in {time.monotonic() - begin:.0f} s; rows are in {options.json}")
    return 1 if counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
