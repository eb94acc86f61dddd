#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the snippets of README and docs/.

The Python blocks of a page run in order, in one process and one namespace, in an empty folder. The process is
forked after the import of PyTorch. A block behind a comment `<!-- from FILE -->` is a quotation and does not run: its lines must be in FILE,
which other tests run or compile. In a quotation, a line `...` stands for skipped lines.
Every C++ block needs this comment. Of sh blocks, the lines `build/remat ...` run if the program is given, and the lines `python -m remat ...`
run with docs/snippets on the import path.

usage: docs.py [PROGRAM] [PAGE...]: PROGRAM is the path of `remat`; pages are relative to the root; default: all pages
"""
from __future__ import annotations

import importlib
import multiprocessing
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from typing import IO

ROOT = pathlib.Path(__file__).resolve().parents[3]
SNIPPETS = str(ROOT / "docs/snippets")
os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), SNIPPETS])}
BLOCK = re.compile(r"(?:<!-- from (?P<source>\S+) -->\n)?^```(?P<kind>python|cpp|sh)\n(?P<code>.*?)^```$", re.M | re.S)


def missing(code: str, source: str) -> str | None:
    """The first line of the first part that is missing in the file; None if all parts are in the file, in order. Indentation is ignored."""
    found = [line.strip() for line in (ROOT / source).read_text().splitlines() if line.strip()]
    begin = 0
    for part in re.split(r"^\s*\.\.\.\s*$", code, flags=re.M):
        wanted = [line.strip() for line in part.splitlines() if line.strip()]
        while found[begin:begin + len(wanted)] != wanted:
            begin += 1
            if begin >= len(found):
                return wanted[0]
        begin += len(wanted)
    return None


def run_python(page: str, text: str) -> str | None:
    """Runs all Python blocks of a page that are not quotations. Error messages have the line numbers of the page."""
    script = [""] * (text.count("\n") + 2)
    for block in BLOCK.finditer(text):
        if block["kind"] == "python" and not block["source"]:
            line = text[:block.start("code")].count("\n")
            script[line:line + block["code"].count("\n")] = block["code"].splitlines()
    if not any(script):
        return None
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "page.py").write_text("\n".join(script))
        with tempfile.TemporaryFile("w+") as output:
            process = multiprocessing.get_context("fork").Process(target=run_script, args=(folder, output))
            process.start()
            process.join()
            output.seek(0)
            return None if process.exitcode == 0 else f"{page}: exit status {process.exitcode}: {output.read()}"


def run_script(folder: str, output: IO[str]) -> None:
    """Runs page.py of a folder in this process, which has been forked after the imports that pages share."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    os.chdir(folder)
    sys.path[0], sys.argv[1:] = folder, []
    sys.path.append(SNIPPETS)
    runpy.run_path("page.py", run_name="__main__")


def run_shell(page: str, code: str, program: str | None) -> list[str]:
    """Runs the lines that call the program or the package, in a temporary folder."""
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("bench", "build", "docs"):
            (pathlib.Path(folder) / name).symlink_to(ROOT / name)
        for line in code.splitlines():
            called = program if line.startswith("build/remat ") else sys.executable if line.startswith("python -m remat ") else None
            if called:
                words = [called, *shlex.split(line, comments=True)[1:]]
                done = subprocess.run(words, cwd=folder, text=True, capture_output=True)
                if done.returncode:
                    failures.append(f"{page}: {line}: exit status {done.returncode}: {done.stdout}{done.stderr}")
    return failures


def check(page: pathlib.Path, program: str | None) -> list[str]:
    name, text, failures = str(page.relative_to(ROOT)), page.read_text(), []
    for block in BLOCK.finditer(text):
        place = f"{name}:{text[:block.start()].count(chr(10)) + 1}"
        if block["source"]:
            line = missing(block["code"], block["source"])
            failures += [f"{place}: not in {block['source']}: {line}"] if line else []
        elif block["kind"] == "cpp":
            failures.append(f"{place}: a C++ block needs a comment <!-- from FILE --> before it")
        elif block["kind"] == "sh":
            failures += run_shell(place, block["code"], program)
    failure = run_python(name, text)
    return failures + ([failure] if failure else [])


if __name__ == "__main__":
    arguments = sys.argv[1:]
    program = str(pathlib.Path(arguments.pop(0)).resolve()) if arguments and not arguments[0].endswith(".md") else None
    pages = [ROOT / name for name in arguments] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    importlib.import_module("torch")  # before all forks
    failures = [failure for page in pages for failure in check(page, program)]
    print("\n".join(failures) or f"the snippets of {len(pages)} pages do what they should")
    sys.exit(bool(failures))
