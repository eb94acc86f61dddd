# SPDX-License-Identifier: Apache-2.0
"""Compares the plans of `remat.plan` with the bounds of all budgets."""

import itertools
import unittest

import torch
from torch import nn

import remat


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.layers(x)[0]).mean()


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        out = torch.zeros_like(x)
        for i, line in enumerate(x):
            out[i] = self.layer(line).sin()
        return out.square().mean()


class Bounds(unittest.TestCase):
    def test_no_plan_contradicts_a_bound(self):
        """Memory that an operator overwrites counts once: in the backward of an LSTM, and in a loop that writes rows of its result."""
        device = remat.Roofline(1e11, 1e10)
        for model, x in ((Lstm(), torch.randn(8, 20, 32)), (Rows(), torch.randn(8, 256, 64))):
            plain = remat.plan(model, (x,), device=device, time_limit=1)
            with self.assertRaises(remat.OverBudget) as e:
                remat.plan(model, (x,), budget=1, device=device, time_limit=1)
            for budget in [int(e.exception.bound * share / 10) for share in range(4, 10)] + [e.exception.needed, plain.peak * 9 // 10]:
                with self.subTest(type(model).__name__, budget=budget, bound=e.exception.bound):
                    try:
                        remat.plan(model, (x,), budget=budget, device=device, time_limit=1)
                    except remat.OverBudget:
                        self.assertLess(budget, e.exception.needed)
                    else:
                        self.assertGreaterEqual(budget, e.exception.bound)

    def test_no_plan_is_faster_than_a_bound(self):
        """The same for bounds on the time. Each plan counts for all budgets that it fits."""
        device, x = remat.Roofline(1e11, 1e10), torch.randn(8, 80, 32)
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())), Lstm())
        peak = remat.plan(model, (x,), device=device, time_limit=1).peak
        plans = {budget: remat.plan(model, (x,), budget=budget, device=device, time_limit=1) for budget in range(peak * 6 // 10, peak, peak // 30)}
        for fast, slow in ((fast, slow) for fast, slow in itertools.product(plans.values(), plans) if fast.peak <= slow):
            self.assertLessEqual(plans[slow].bound, fast.seconds * (1 + 1e-9), (fast.peak, slow))


if __name__ == "__main__":
    unittest.main()
