#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Demands that each case of this folder is refused by the compiler, and that the diagnostic says why.

usage: run.py COMPILER... -- FLAG...
A case is a C++ file with one or more lines `// expect: text`: each text must be in the diagnostic. What stands between
`// broken` and `// end` is the mistake: without it the case must compile, so that nothing else is what is refused.
"""
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


failures = 0
cases = sorted(here.glob("*.cpp"))
for compiler in compilers:
    for case in cases:
        source = case.read_text()
        expected = re.findall(r"// expect: (.*)", source)
        repaired = re.sub(r"// broken\n.*?// end\n", "", source, flags=re.S)
        status, diagnostic = compile(compiler, source)
        missing = [text for text in expected if text not in diagnostic]
        plain, complaint = compile(compiler, repaired)
        if not expected or status == 0 or missing or repaired == source or plain != 0:
            failures += 1
            print(f"FAILED: {case.name} with {compiler}: exit {status}, missing {missing}, without the mistake exit {plain}\n{diagnostic}\n{complaint}")
if not cases:
    sys.exit("no cases")
print(f"{len(cases)} cases, {len(compilers)} compilers, {failures} failures")
sys.exit(1 if failures else 0)
