# SPDX-License-Identifier: Apache-2.0
"""Runs each part in its own processes, within time limits. Uses only the standard library."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import tempfile
import time

from build import ROOT, Package
from report import FAILED, NOT_AVAILABLE, PASSED, cause_of_end, cause_of_text, read, say

#: Parts and their shares of the total time.
PARTS = {"devices": 0.03, "suites": 0.12, "bits": 0.17, "memory": 0.08, "speed": 0.45, "finetune": 0.15}
DEVICES_SECONDS = 90.0  #: time limit of the part `devices`
SUITES = ("torch_streams", "torch_executor")
HERE = pathlib.Path(__file__).resolve().parent
#: Makes matrix products of cuBLAS deterministic.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Runner:
    """Runs parts one after another, and collects their rows."""

    def __init__(self, package: Package, options: argparse.Namespace):
        self._package, self._options = package, options
        self._cache = tempfile.TemporaryDirectory()
        self._env = package.environment() | {"XDG_CACHE_HOME": self._cache.name}  # an empty cache: ignores earlier profiles and plans
        self._end = time.monotonic() + 60 * options.minutes
        self.rows: list[dict] = []
        self.device = self.name = ""
        self.emulated = False
        self.versions: dict = {}
        self.found: list[dict] = []

    def _limit(self, part: str, chosen: list[str]) -> float:
        """Time limit of a part in seconds: its share of the remaining time."""
        later = chosen[chosen.index(part):]
        return max(1.0, (self._end - time.monotonic()) * PARTS[part] / sum(PARTS[p] for p in later))

    def _row(self, part: str, case: str, what: str, verdict: str, cause: str = "", goal: str = "", **figures) -> None:
        self.rows.append({"part": part, "case": case, "what": what, "figures": figures, "goal": goal, "verdict": verdict, "cause": cause})

    # --- the device ----------------------------------------------------------------------------------------------------------

    def find_device(self) -> str:
        """Chooses the device. Returns an empty text, or one sentence if no device is usable."""
        wanted = self._options.device or os.environ.get("REMAT_TEST_DEVICE", "")
        kind = wanted.split(":")[0]
        self.emulated = kind == "emulated" or (kind == "cuda" and "libemulated_cuda.so" in os.environ.get("LD_PRELOAD", ""))
        self._env["REMAT_TEST_DEVICE"] = kind if self.emulated else wanted or "cpu"
        self._env["GPU_CHECK_DEVICE"] = wanted
        limit = min(DEVICES_SECONDS, 60 * self._options.minutes)
        told = self._cases("devices", limit)
        self.versions, self.found = told.get("versions", {}), told.get("devices", [])
        problem = told.get("problem", "") if "problem" in told else self.rows[-1]["cause"] if self.rows else "the device could not be asked"
        if not problem:
            self.device = told["device"]
            self.name = next(d["name"] for d in self.found if d["device"] == self.device)
            self._env["REMAT_TEST_DEVICE"] = kind if self.emulated else self.device
        return problem

    # --- parts ---------------------------------------------------------------------------------------------------------------

    def run(self, part: str, chosen: list[str]) -> None:
        limit = self._limit(part, chosen)
        say(f"gpu-check: {part} (at most {limit:.0f} s)")
        if part == "suites":
            self._suites(limit)
        else:
            self._cases(part, limit)

    def _suites(self, limit: float) -> None:
        end = time.monotonic() + limit
        env = self._env | DETERMINISTIC
        emulation = {"EMULATED_WORKSPACE": "65536", "EMULATED_ALIGNMENT": "512"} if self.emulated else {}
        for name in ("devices.py", *SUITES):
            script = [self._package.python, str(ROOT / "adapters/python/tests" / name), *(["--short"] if self._options.tiny else [])]
            command = self._package.suite(name, self._options.tiny) if name in SUITES else script
            if command is None:
                advice = f"{name} is not built, or older than the library: ninja -C FOLDER adapters/torch/tests/{name}"
                self._row("suites", name, "C++", NOT_AVAILABLE, advice)
                continue
            begin = time.monotonic()
            seconds = max(1.0, end - begin)
            try:
                done = subprocess.run(command, cwd=ROOT, env=env | emulation, capture_output=True, text=True, timeout=seconds)
                lines = done.stdout.splitlines()
                failed = next((f"{line.strip()} {lines[k + 1].strip()}" for k, line in enumerate(lines[:-1]) if line.endswith(" FAILED:")), "")
                output = (failed or done.stdout) if name in SUITES else done.stderr
                verdict, cause = (PASSED, "") if done.returncode == 0 else (FAILED, cause_of_end(done.returncode, output))
                told = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
            except subprocess.TimeoutExpired:
                verdict, cause, told = FAILED, f"timed out after {seconds:.0f} s", ""
            kind, seconds = "C++" if name in SUITES else "Python", round(time.monotonic() - begin, 1)
            self._row("suites", name, kind, verdict, cause, "passes", says=told.strip(), seconds=seconds)

    def _cases(self, part: str, limit: float) -> dict:
        """Runs the cases of a part in a process. If a case kills the process or hangs, it fails, and the next cases run in a new process."""
        end, told, left = time.monotonic() + limit, {}, None
        while left is None or left:
            with tempfile.TemporaryDirectory() as folder:
                log = pathlib.Path(folder) / "log"
                cause, errors = self._child(part, log, end, left)
                entries = read(log)
            for entry in entries:
                told |= entry.get("told", {})
                if "row" in entry:
                    self.rows.append({"part": part} | entry["row"])
            begun, ended = [e["begin"] for e in entries if "begin" in e], [e["end"] for e in entries if "end" in e]
            left = told.get("cases", []) if left is None else left
            if not begun:  # the process ended before its first case
                told.setdefault("problem", cause or cause_of_text(errors.strip().splitlines()[-1] if errors.strip() else "it said nothing"))
                self._row(part, ", ".join(left) or "start", "", FAILED, told["problem"])
                break
            if begun[-1] not in ended:
                self._row(part, begun[-1], "", FAILED, cause or "the process ended within it")
            left = [case for case in left if case not in begun]
            if left and time.monotonic() > end - 1:
                for case in left:
                    self._row(part, case, "", FAILED, f"no time was left of the {limit:.0f} s of this part")
                break
        return told

    def _child(self, part: str, log: pathlib.Path, end: float, cases: list[str] | None) -> tuple[str, str]:
        """Runs cases in a process until it ends, or until a case exceeds its limit. Returns (cause of a failure, error output)."""
        env = self._env | (DETERMINISTIC if part == "bits" else {})
        seconds = end - time.monotonic()
        more = [*(["--tiny"] if self._options.tiny else []), *(cases or [])]
        command = [self._package.python, str(HERE / "child.py"), part, str(log), f"{seconds * 0.9:.1f}", *more]
        with tempfile.TemporaryFile("w+") as errors:
            try:
                process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=errors)
            except OSError as e:
                return f"{self._package.python} does not run: {e}", ""
            cause, case, limit, begin = "", "", seconds, time.monotonic()
            while process.poll() is None:
                time.sleep(0.05)
                entries = read(log)
                begun = [e["begin"] for e in entries if "begin" in e]
                if begun and begun[-1] != case:
                    case, begin = begun[-1], time.monotonic()
                    known = next((e["told"]["cases"] for e in entries if "cases" in e.get("told", {})), [case])
                    limit = (end - begin) * (1 if len(known) == len(begun) else min(1.0, 2 / (len(known) - len(begun) + 1)))
                if time.monotonic() - begin > limit:
                    process.kill()
                    cause = f"timed out after {limit:.0f} s"
                    break
            code = process.wait()
            errors.seek(0)
            text = errors.read()
        return cause or (cause_of_end(code, text) if code else ""), text
