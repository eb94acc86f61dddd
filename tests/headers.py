#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Demands that every public header is listed to be installed, and, if REMAT_FULL is set, compiles alone, and twice.

usage: headers.py INCLUDE_FOLDER COMPILER FLAG... -- HEADER...
"""
import concurrent.futures
import os
import pathlib
import subprocess
import sys

at = sys.argv.index("--")
folder, command, listed = pathlib.Path(sys.argv[1]), sys.argv[2:at], sys.argv[at + 1:]


def complaint(header):
    """What the compiler says; nothing, if it is content."""
    done = subprocess.run([*command, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{folder}", "-x", "c++", "-"],
                          input=2 * f"#include <remat/{header}>\n", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout if done.returncode else ""


there = {str(f.relative_to(folder / "remat")) for f in (folder / "remat").rglob("*.hpp")}
failures = [f"{h}: not in include/remat/meson.build, or not there" for h in sorted(there ^ set(listed))]
compiled = listed if os.environ.get("REMAT_FULL") else []
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    failures += [f"{h} alone:\n{said}" for h, said in zip(compiled, pool.map(complaint, compiled)) if said]
print("\n".join(failures) or f"{len(listed)} headers, {len(compiled)} compiled alone")
sys.exit(1 if failures or not listed else 0)
