# SPDX-License-Identifier: Apache-2.0
"""A process that runs cases of one part on the device of REMAT_TEST_DEVICE. It reports to its parent through a log file.

usage: child.py PART LOG SECONDS [--tiny] [CASE...]
"""

from __future__ import annotations

import importlib
import sys

from report import FAILED, Log, cause_of, lost

PARTS = ("devices", "bits", "memory", "speed", "finetune")


def main(part: str, path: str, seconds: str, *more: str) -> int:
    log, tiny = Log(path), "--tiny" in more
    try:
        from context import Context, threads

        threads()
        module = importlib.import_module("inspect_device" if part == "devices" else part)
        c = Context(log, tiny, float(seconds))
        chosen = [case for case in more if case != "--tiny"] or module.cases(tiny)
    except Exception as e:
        log.tell(problem=cause_of(e))
        return 1
    log.tell(cases=chosen)
    for case in chosen:
        log.begin(case)
        try:
            module.run(c, case)
        except Exception as e:
            cause = cause_of(e)
            log.row(case, "", FAILED, cause)
            e.__traceback__ = None
            if lost(cause):
                log.end(case)
                return 3
        log.end(case)
        c.free()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
