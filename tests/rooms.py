#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks every include of the repository against the rooms that may include each other (docs/architecture.md).

usage: rooms.py SOURCE_ROOT
"""
import pathlib
import re
import sys

PLANNER = {"core", "graph", "structure", "milp", "order", "copies", "bound", "tiers", "chain", "staged", "hierarchy", "solver", "layout", "io"}
MAY_INCLUDE = {
    "core": set(), "graph": {"core"}, "structure": {"core"}, "order": {"core"}, "milp": {"core"}, "layout": {"core"}, "io": {"core", "layout"},
    "copies": {"core", "order"}, "tiers": {"core", "bound", "copies"},
    "bound": {"core", "milp", "order"}, "chain": {"core", "structure", "order"}, "staged": {"core", "milp"},
    "hierarchy": {"core", "structure", "chain", "milp", "order"}, "solver": PLANNER - {"graph", "layout", "io"}, "report": {"core", "structure", "layout", "io"},
    "testing": {"core", "graph", "milp"},
    "remat.hpp": PLANNER | {"registry", "version.hpp"}, "solvers.hpp": {"solver"}, "version.hpp": set(), "highs": {"core", "milp"}, "glpk": {"core", "milp"},
    "cuda": {"core"}, "registry": PLANNER | {"highs", "glpk"},
    "torch": PLANNER | {"registry", "cuda", "pytorch"}, "python": PLANNER | {"registry", "pytorch", "report"},
    "tools": PLANNER | {"registry", "report", "version.hpp"},
}
#: The rooms of adapters/torch/src, and the rooms whose private files they may include.
TORCH_MAY_INCLUDE = {
    "base": set(), "kernels": {"base"}, "program": {"base", "kernels"}, "capture": {"base", "device", "program"}, "device": {"base"},
    "profile": {"base", "capture", "program"}, "plan": {"base", "profile", "program"}, "run": {"base", "device", "plan", "program"},
    "autograd": {"base", "capture", "plan"}, "offload": {"base", "device"}, "session": {"autograd", "base", "capture", "device", "plan"}, "front": set(),
}
root = pathlib.Path(sys.argv[1])
failures, includes = [], 0
for folder in ("include", "adapters", "tools", "tests", "bench", "examples"):
    for file in sorted(f for f in (root / folder).rglob("*") if f.suffix in (".hpp", ".cpp")):
        path = file.relative_to(root)
        room = {"include": lambda: path.parts[2], "adapters": lambda: path.parts[1]}.get(folder, lambda: folder)()
        if "tests" in path.parts:
            room = "tests"
        in_torch = path.parts[:3] == ("adapters", "torch", "src")
        for quoted, name in re.findall(r'^#include (?:"([^"]*)"|<remat/([^/>]*))', file.read_text(), re.M):
            includes += 1
            if quoted and folder != "tools" and "tools" in pathlib.PurePath(quoted).parts:
                failures.append(f"{path} reaches into tools/: {quoted}")
            if quoted and folder == "include":
                failures.append(f"{path} includes {quoted} by its place and not as <remat/...>")
            if quoted and in_torch:
                other = (file.parent / quoted).resolve().relative_to(root.resolve()).parts[3]
                if other != path.parts[3] and other not in TORCH_MAY_INCLUDE[path.parts[3]]:
                    failures.append(f"{path}: {path.parts[3]} may not include {quoted}")
            if name and room not in ("tests", "bench", "examples") and name != room and name not in MAY_INCLUDE[room]:
                failures.append(f"{path}: {room} may not include {name}")
print("\n".join(failures) or f"{includes} includes, all where they may be")
sys.exit(1 if failures or includes < 500 else 0)
