#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the public headers. Each header must be installed, state complexities, and name the libraries that it needs. solvers.hpp
and the registry must have every solver, and version.hpp the version of the project. If REMAT_FULL is set, each header must
compile alone, and when it is included twice.

usage: headers.py SOURCE_ROOT VERSION COMPILER FLAG... -- HEADER...
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

at = sys.argv.index("--")
root, version, command, listed = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:at], sys.argv[at + 1:]
folder = root / "include"
#: Parts of solvers and combinations of solvers. The registry has the solvers made from them.
COMBINE = {"solver/automatic.hpp", "solver/cheap_orders.hpp", "solver/hierarchical.hpp", "solver/lower_peak.hpp", "solver/order_in_phases.hpp", "solver/prove_bound.hpp", "solver/proving.hpp"}

#: Types, concepts and texts, which have no complexity.
NOTHING_TO_COUNT = {"core/error.hpp", "core/evaluation.hpp", "core/solver.hpp", "core/text.hpp", "core/types.hpp", "graph/cost_model.hpp", "graph/dag.hpp", "io/json.hpp",
                    "report/style.hpp", "testing/archetypes.hpp", "remat.hpp", "solvers.hpp", "version.hpp"}


def complaint(header):
    """The errors of the compiler; nothing if the header compiles."""
    done = subprocess.run([*command, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{folder}", "-x", "c++", "-"],
                          input=2 * f"#include <remat/{header}>\n", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout if done.returncode else ""


there = {str(f.relative_to(folder / "remat")) for f in (folder / "remat").rglob("*.hpp")}
failures = [f"{h}: not in include/remat/meson.build, or not there" for h in sorted(there ^ set(listed))]


def included(*files):
    """The headers of remat that the given files include."""
    return {name for f in files for name in re.findall(r"^#include <remat/(.*)>", f.read_text(), re.M)}


def reached(header, seen):
    """All headers that `header` includes, directly or through headers of remat. Adds them to `seen`."""
    for name in re.findall(r"^#include <(.*)>", (folder / "remat" / header).read_text(), re.M):
        if name not in seen:
            seen.add(name)
            if name.startswith("remat/"):
                reached(name.removeprefix("remat/"), seen)
    return seen


for header in sorted(there - {"solvers.hpp"}):
    names, about = reached(header, set()), (folder / "remat" / header).read_text().partition("#pragma once")[0]
    for library, directory in (("Boost.Graph", "boost/"), ("Eigen", "Eigen/"), ("nlohmann/json", "nlohmann/")):
        if any(name.startswith(directory) for name in names) != (library in about):
            failures.append(f"{header}: '@file' has to say 'Needs {library}.' where, and only where, it includes that library")


failures += [f"{h}: states no complexity" for h in sorted(there - NOTHING_TO_COUNT) if "omplexity" not in (folder / "remat" / h).read_text()]
solvers = {h for h in listed if h.startswith("solver/")}
failures += [f"{h}: not in solvers.hpp, or not there" for h in sorted(solvers ^ included(folder / "remat/solvers.hpp"))]
registered = included(*(root / "adapters/registry/src").glob("*.cpp"))
failures += [f"{h}: in no file of adapters/registry/src" for h in sorted(solvers - COMBINE - registered)]
macros = dict(re.findall(r"^#define REMAT_(\w+) \"?([\d.]+)\"?$", (folder / "remat/version.hpp").read_text(), re.M))
parts = ".".join(macros.get(f"VERSION_{part}", "?") for part in ("MAJOR", "MINOR", "PATCH"))
failures += [f"version.hpp says {told}, meson.build {version}" for told in (parts, macros.get("VERSION")) if told != version]
all_of_it = subprocess.run([*command, "-std=c++20", "-M", f"-I{folder}", "-x", "c++", "-"], input="#include <remat/remat.hpp>\n",
                           capture_output=True, text=True, check=True).stdout
failures += [f"remat.hpp includes {name}, which it is to do without" for name in ("boost/", "Eigen/", "nlohmann/") if name in all_of_it]
compiled = listed if os.environ.get("REMAT_FULL") else []
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    failures += [f"{h} alone:\n{said}" for h, said in zip(compiled, pool.map(complaint, compiled)) if said]
print("\n".join(failures) or f"{len(listed)} headers, {len(compiled)} compiled alone")
sys.exit(1 if failures or not listed else 0)
