# SPDX-License-Identifier: Apache-2.0
"""Options of solvers: they change plans, are part of the cache key, and errors name them."""
import json
import pathlib
import tempfile
import unittest

import torch
from torch import nn

import remat


class Net(nn.Module):
    """Layers with more bytes of activations than of weights."""

    def __init__(self, depth=8, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


DEVICE = remat.Roofline(1e11, 1e10)


def planned(**options):
    return remat.plan(Net(), (torch.randn(512, 32),), budget="60% of activations", time_limit=20, device=DEVICE, **options)


def steps(plan):
    return json.loads(plan.document())["steps"]


class Plans(unittest.TestCase):
    def test_bounds_of_parts_change_the_plan(self):
        usual, one = planned(solver="rockmate"), planned(solver="rockmate", solver_options={"saved": 1, "peaks": 1})
        self.assertNotEqual(steps(usual), steps(one))

    def test_sizes_of_parts_change_the_plan(self):
        small, large = (planned(solver="rockmate", solver_options={"cut.size": size, "cut.most": 100}) for size in (4, 40))
        self.assertNotEqual(steps(small), steps(large))

    def test_the_document_names_the_options(self):
        plan = planned(solver="min_cut", solver_options={"cuts": 8, "bound": False})
        self.assertEqual(json.loads(plan.document())["solver"], "min_cut (bound=false, cuts=8)")
        self.assertFalse(plan.fallback)

    def test_a_plan_without_the_solver_says_so(self):
        plan = planned(solver="store_all")  # store_all does not fit this budget
        self.assertTrue(plan.fallback)
        self.assertGreater(plan.recomputed, 0)
        self.assertFalse(planned(solver="min_cut").fallback)


class Cache(unittest.TestCase):
    """The plan cache on disk: other options mean another entry."""

    def trained(self, folder, **options):
        torch.manual_seed(0)
        model = remat.wrap(Net(), budget="60% of activations", cache=folder, planner=remat.Planner(time_limit=5, **options))
        model(torch.randn(512, 32)).backward()
        return remat.of(model).plan

    def test_keys(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)

            def kept():
                return len(list(folder.rglob("*.json")))

            usual = self.trained(folder, solver="min_cut")
            first = kept()
            self.assertGreater(first, 0)
            few = self.trained(folder, solver="min_cut", solver_options={"cuts": 2, "effort": 0})
            self.assertGreater(kept(), first)
            self.assertEqual((usual.solver, few.solver), ("min_cut", "min_cut (cuts=2, effort=0)"))
            both = kept()
            again = self.trained(folder, solver="min_cut", solver_options={"effort": 0, "cuts": 2})
            self.assertEqual((kept(), again.solver), (both, few.solver))

    def test_a_fallback_is_one_in_the_next_process_too(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual([self.trained(folder, solver="store_all").fallback for _ in range(2)], [True, True])


class BadInput(unittest.TestCase):
    def test_errors_name_the_option(self):
        problem = {"format": "remat-problem", "version": 1, "name": "one", "targets": [0], "values": [{"name": "a", "bytes": 1}],
                   "operations": [{"name": "a", "inputs": [], "outputs": [0], "seconds": 1.0}]}
        calls = (lambda options: remat.wrap(Net(), budget="1 GiB", planner=remat.Planner(solver="rockmate", solver_options=options)),
                 lambda options: planned(solver="rockmate", solver_options=options),
                 lambda options: remat.curve(Net(), (torch.randn(512, 32),), points=3, solver="rockmate", solver_options=options, device=DEVICE),
                 lambda options: remat.solve(problem, 10, solver="rockmate", solver_options=options))
        for call in calls:
            for options, kind, why in (({"parts": 3}, remat.Error, 'rockmate has no option "parts"; it has .*cut.most'),
                                       ({"saved": 0}, remat.Error, 'saved must be an integer from 1 to 100, got "0"'),
                                       ({"saved": 2.5}, remat.Error, "saved"), ({"saved": True}, remat.Error, "saved"),
                                       ({"saved": "2"}, TypeError, "'saved' must be a name with a number"), ({3: 2}, TypeError, "3"),
                                       ({"saved": None}, TypeError, "saved"), ([("saved", 1)], TypeError, "mapping"), (3, TypeError, "mapping")):
                with self.assertRaisesRegex(kind, why):
                    call(options)
        with self.assertRaisesRegex(remat.Error, "magic"):
            remat.solver_options("magic")

    def test_options_are_listed(self):
        for solver in remat.solvers():
            for name, text in remat.solver_options(solver).items():
                self.assertRegex(text, r"^[\w.]+: .+; (a number|an integer) from|true or false$", name)
        self.assertIn("cut.size", remat.solver_options("rockmate"))


if __name__ == "__main__":
    unittest.main()
