#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Demands that each case of this folder is refused by the compiler, and that the diagnostic says why.

usage: run.py COMPILER... -- FLAG...
A case is a C++ file with one or more lines `// expect: text`: each text must be in the diagnostic. What stands between
`// broken` and `// end` is the mistake: without it the case must compile, so that nothing else is what is refused.
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

here = pathlib.Path(__file__).resolve().parent
compilers, flags = sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:]


def compile(compiler, source):
    command = [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", f"-I{here.parent.parent / 'include'}", *flags, "-"]
    done = subprocess.run(command, input=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def judge(case, compiler):
    """What is wrong with the case; nothing, if it is refused as it should be."""
    source = case.read_text()
    expected = re.findall(r"// expect: (.*)", source)
    repaired = re.sub(r"// broken\n.*?// end\n", "", source, flags=re.S)
    status, diagnostic = compile(compiler, source)
    missing = [text for text in expected if text not in diagnostic]
    plain, complaint = compile(compiler, repaired)
    if expected and status != 0 and not missing and repaired != source and plain == 0:
        return ""
    return f"FAILED: {case.name} with {compiler}: exit {status}, missing {missing}, without the mistake exit {plain}\n{diagnostic}\n{complaint}\n"


cases = sorted(here.glob("*.cpp"))
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    failures = [said for compiler in compilers for said in pool.map(lambda case: judge(case, compiler), cases) if said]
if not cases:
    sys.exit("no cases")
print(*failures, f"{len(cases)} cases, {len(compilers)} compilers, {len(failures)} failures", sep="")
sys.exit(1 if failures else 0)
