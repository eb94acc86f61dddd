# SPDX-License-Identifier: Apache-2.0
"""Rows of results, causes of failures, and the table. Uses only the standard library."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

PASSED, FAILED, NOT_JUDGED, NOT_AVAILABLE, TOLD = "passed", "failed", "not judged", "not available", ""


class Log:
    """Messages from a process that runs cases to its parent: a file with one JSON object per line. It survives the death of the process."""

    def __init__(self, path: str | os.PathLike):
        self._path = path

    def _write(self, **entry) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(entry) + "\n")

    def begin(self, case: str) -> None:
        self._write(begin=case, at=time.time())

    def end(self, case: str) -> None:
        self._write(end=case)

    def tell(self, **values) -> None:
        self._write(told=values)

    def row(self, case: str, what: str, verdict: str, cause: str = "", goal: str = "", **figures) -> None:
        """verdict: one of the constants above. cause: one sentence, unless the row passed. figures: names and values with their units."""
        self._write(row={"case": case, "what": what, "figures": figures, "goal": goal, "verdict": verdict, "cause": cause})


def read(path: str | os.PathLike) -> list[dict]:
    """The entries so far. An incomplete last line is ignored."""
    try:
        text = pathlib.Path(path).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


def first_line(text: str, most: int = 300) -> str:
    line = next((part.strip() for part in text.splitlines() if part.strip()), "")
    return line if len(line) <= most else line[:most] + " ..."


#: Phrases in errors of drivers and of emulated hardware that mean that the device is lost.
_LOST = ("device is lost", "device lost", "cuda error", "hip error", "unspecified launch failure", "illegal memory access",
         "device-side assert", "fell off the bus", "ecc error")


def cause_of_text(text: str) -> str:
    """One sentence for the last line of a traceback."""
    line, low = first_line(text), text.lower()
    if "undefined symbol" in low or "built for torch" in low or "another torch" in low:
        return f"another torch version: {line}"
    if "no module named" in low:
        return f"a package is missing: {line}"
    if "overbudget" in low or "smallest budget" in low:
        return f"over budget: {line}"
    if "no nvidia driver" in low or "driver on your system is too old" in low:
        return f"no driver that is new enough: {line}" if "too old" in low else f"no driver: {line.split('. ')[0]}"
    if "device type at start of device string" in low or "invalid device string" in low:
        return f"PyTorch knows no such device: {line.rpartition(': ')[2]}"
    if "out of memory" in low:
        return f"out of memory: {line}"
    if any(word in low for word in _LOST):
        return f"device lost: {line}"
    return line or "no message"


def cause_of(error: BaseException) -> str:
    """One sentence for an exception."""
    name = type(error).__name__
    if name == "OutOfMemoryError":
        return f"out of memory: {first_line(str(error))}"
    if name == "OverBudget" and error.needed:
        return f"over budget: no schedule fits; the smallest budget known is {size(error.needed)}"
    cause = cause_of_text(str(error) or name)
    return f"{name}: {cause}" if cause == first_line(str(error)) else cause


def lost(cause: str) -> bool:
    """True if the device is lost, so no other case can run in this process."""
    return cause.startswith("device lost")


def cause_of_end(code: int, errors: str) -> str:
    """One sentence for a process that ended with exit code `code`."""
    if code < 0:
        import signal

        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    lines = [line for line in errors.splitlines() if line.strip()]
    return cause_of_text(lines[-1]) if lines else f"ended with exit code {code}"


def size(n: float) -> str:
    """Bytes as text with a unit."""
    return f"{n / 2**30:.2f} GiB" if abs(n) >= 2**30 else f"{n / 2**20:.2f} MiB"


def table(rows: list[dict]) -> str:
    """All rows as one Markdown table with aligned columns. Long causes follow as notes."""
    header, notes = ["part", "case", "what", "figures", "goal", "verdict"], []
    lines = [header]
    for r in rows:
        verdict, cause = r["verdict"], r["cause"]
        if len(cause) > 44:
            if cause not in notes:
                notes.append(cause)
            verdict += f" [{notes.index(cause) + 1}]"
        elif cause:
            verdict += f": {cause}"
        figures = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in r["figures"].items())
        lines.append([r["part"], r["case"], r["what"], figures, r["goal"], verdict.lstrip(": ")])
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text + [f"[{k}] {cause}" for k, cause in enumerate(notes, 1)])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
