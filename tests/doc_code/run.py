#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles every example (`@code`) in the comments of public headers. An example becomes the body of a function;
around.hpp declares the names that examples share. Examples with templates or preprocessor lines stand outside of functions.

usage: run.py COMPILER... -- FLAG...
"""
import pathlib
import re
import subprocess
import sys

here = pathlib.Path(__file__).resolve().parent
root = here.parent.parent
compiler, flags = sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:]
headers = sorted((root / "include/remat").rglob("*.hpp"))
first = root / "include/remat/graph/dag.hpp"

examples = []  # (header, line, text)
for header in headers:
    for found in re.finditer(r"@code\n(.*?)^ */// @endcode", text := header.read_text(), re.M | re.S):
        lines = [re.sub(r"^ *///? ?", "", line) for line in found.group(1).splitlines()]
        examples.append((header, text[:found.start(1)].count("\n") + 1, "\n".join(lines)))
examples.sort(key=lambda e: e[0] != first)

source = [f"#include <remat/{h.relative_to(root / 'include/remat')}>" for h in headers]
source += ["#include <remat/glpk/backend.hpp>", "#include <remat/highs/backend.hpp>"]
for n, (header, line, text) in enumerate(examples):
    text = re.sub(r"^#include.*", "", text, flags=re.M)
    outside = re.search(r"^(template|#)", text, re.M)
    place = f'#line {line} "{header.relative_to(root)}"'
    source += [place, text] if outside else [f"void example_{n}() {{", place, text, "}"]
    if n == 0:
        source.append(f'#include "{here / "around.hpp"}"')
command = [*compiler, "-std=c++20", "-fsyntax-only", "-Wno-unused", "-x", "c++", *flags]
done = subprocess.run([*command, *(f"-I{root / folder / 'include'}" for folder in (".", "adapters/glpk", "adapters/highs")), "-"],
                      input="\n".join(source) + "\n", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
print(done.stdout or f"{len(examples)} examples compile")
sys.exit(1 if done.returncode or len(examples) < 80 else 0)
