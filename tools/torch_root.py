#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the folder of the torch package and its version, without importing torch."""
import importlib.util
import pathlib
import sys

spec = importlib.util.find_spec("torch")
if spec is None or not spec.submodule_search_locations:
    sys.exit("no torch package in this Python")
root = pathlib.Path(spec.submodule_search_locations[0])
scope = {}
exec((root / "version.py").read_text(), scope)
print(root)
print(scope["__version__"].split("+")[0])
