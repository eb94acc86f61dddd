#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the compiler refuses each case of this folder, and that its diagnostic gives the reason.

usage: run.py COMPILER... -- FLAG...
A case is a C++ file with one or more lines `// expect: text`: each text must be in the diagnostic. The mistake stands between
`// broken` and `// end`. Every error must come from there, so that the compiler refuses the mistake and nothing else.
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

here = pathlib.Path(__file__).resolve().parent
compilers, flags = sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:]


def lines_of_errors(case, diagnostic):
    """For each error, its line in the case, or the line that instantiates the template with the error; else None."""
    needed_by = None
    for line in diagnostic.splitlines():
        at = re.match(re.escape(str(case)) + r":(\d+):", line)
        if "error: " in line:
            yield int(at.group(1)) if at else needed_by
            needed_by = None
        elif at and "required from" in line:
            needed_by = int(at.group(1))


def judge(case, compiler):
    """The fault of the case; nothing if the compiler refuses it as expected."""
    source = case.read_text()
    expected = re.findall(r"// expect: (.*)", source)
    mistake = re.search(r"// broken\n.*?// end\n", source, re.S)
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{here.parent.parent / 'include'}", *flags, case]
    diagnostic = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    missing = [text for text in expected if text not in diagnostic]
    errors = list(lines_of_errors(case, diagnostic))
    broken = range(*(source.count("\n", 0, at) + 1 for at in mistake.span())) if mistake else ()
    if expected and errors and not missing and all(line in broken for line in errors):
        return ""
    told = f"missing {missing}, errors in lines {errors}, the mistake is in {broken}"
    return f"FAILED: {case.name} with {compiler}: {told}\n{diagnostic}\n"


cases = sorted(here.glob("*.cpp"))
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    failures = [said for compiler in compilers for said in pool.map(lambda case: judge(case, compiler), cases) if said]
if not cases:
    sys.exit("no cases")
print(*failures, f"{len(cases)} cases, {len(compilers)} compilers, {len(failures)} failures", sep="")
sys.exit(1 if failures else 0)
