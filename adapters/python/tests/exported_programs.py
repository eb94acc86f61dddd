# SPDX-License-Identifier: Apache-2.0
"""Modules from `torch.export.load`: wrapped training equals plain training bit by bit.

exported_programs.py CASES    CASES is adapters/torch/tests/exported.py
"""
import importlib.util
import pathlib
import sys
import tempfile

import torch

import remat

spec = importlib.util.spec_from_file_location("cases", sys.argv[1])
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b))


def in_least_memory(make, train, first):
    """Trains within the smallest known budget. Raises the budget as needed, because the test keeps outputs of earlier steps, which count."""
    budget = first
    while True:
        try:
            return train(remat.wrap(make(), budget=budget, time_limit=1)), budget
        except remat.OverBudget as e:
            assert e.needed > budget, "a budget that was said to do does not"
            budget = e.needed


torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "program.pt2"
    for name, (factory, steps, kwargs, dynamic) in cases.cases().items():
        if name.endswith(("_core", "_functional")):  # decomposed programs, whose modules have no backward
            continue
        kwargs = kwargs or {}
        module = cases.seeded(factory).train()
        torch.export.save(torch.export.export(module, steps[0], kwargs, dynamic_shapes=dynamic, strict=False), file)

        def load():
            return torch.export.load(file).module()

        def train(m):
            return cases.train(m, steps, kwargs)

        plain, full = train(load()), train(remat.wrap(load(), budget="100%", time_limit=1))
        least, budget = in_least_memory(load, train, 1)
        for what in plain:
            assert same(plain[what], full[what]), f"{name} at 100 %: {what}"
            assert same(plain[what], least[what]), f"{name} in {budget} bytes: {what}"
        print(name, "at 100 % and in", budget, "bytes")
