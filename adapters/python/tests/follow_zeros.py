# SPDX-License-Identifier: Apache-2.0
"""Backwards that ask whether values are zero. A plan assumes the usual answer; a step with another answer runs as in eager mode."""

import logging
import unittest

import torch
from torch import nn

import remat
from following import Net, Test, backward
from remat import _torch

#: per operator: (function of an activation, change of the activation that gives its backward an unexpected answer)
ASKING = {
    "max": (lambda h: h / (1 + h.max()), lambda h: h * float("nan")),
    "min": (lambda h: h - h.min(), lambda h: h * float("nan")),
    "median": (lambda h: h - h.median(), lambda h: h * float("nan")),
    "nanmedian": (lambda h: h - h.nanmedian(), lambda h: h * float("nan")),
    "cumprod": (lambda h: torch.cumprod(1 + 0.1 * h, -1), lambda h: -10 * torch.ones_like(h)),
    "cumprod of no number": (lambda h: torch.cumprod(h.sigmoid(), 0), lambda h: h - 1000),
    "prod": (lambda h: h + (1 + 0.01 * h[0]).prod(), lambda h: -100 * torch.ones_like(h)),
    "prod of rows": (lambda h: h + (1 + 0.01 * h).prod(-1, keepdim=True), lambda h: -100 * torch.ones_like(h)),
}


class Double(torch.autograd.Function):
    """A custom function. The backward of a step with it is compared with the planned backward, call by call."""

    @staticmethod
    def forward(ctx, h):
        return 2 * h

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def net(function, other, steps):
    class Asks(Net):
        def begin(self):
            self.step = 0

        def act(self, h):
            self.step += 1
            h = torch.where(torch.tensor(self.step in steps), other(h.detach()), h)
            return function(h).nan_to_num(0.5).tanh()

    return Asks


class Zeros(Test):
    def test_values_as_expected(self):
        for name, (function, other) in ASKING.items():
            with self.subTest(name), self.assertNoLogs("remat", logging.WARNING):
                self.check(net(function, other, ()), steps=5)
            with self.subTest(name, code=True), self.assertNoLogs("remat", logging.WARNING):
                self.check(net(lambda h: function(Double.apply(h)), other, ()), steps=5)

    def test_other_values_in_some_steps(self):
        """Steps with an unexpected answer: the first and a later step, or only a later step."""
        for steps in ((1, 4), (3,)):
            for name, (function, other) in ASKING.items():
                with self.subTest(name, steps=steps), self.assertLogs("remat", logging.WARNING) as seen:
                    self.check(net(function, other, steps), steps=6)
                self.assertEqual(len(seen.output), 1)
                self.assertIn("asks whether values are zero", seen.output[0])
                self.assertNotIn("not planned from now on", seen.output[0])

    def test_other_values_in_each_step(self):
        """After several unexpected answers, steps are no longer planned. Results stay exact."""
        for name in ("cumprod", "prod"):
            function, other = ASKING[name]
            with self.subTest(name), self.assertLogs("remat", logging.WARNING) as seen:
                self.check(net(function, other, range(99)), steps=7)
            self.assertIn("not planned from now on", seen.output[-1])

    def test_other_uses(self):
        """The loss uses another output than before. The backward is recorded again, from the graph of the step."""
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

            def forward(self, x):
                h = self.first(x).sigmoid()
                y = torch.cumprod(h, -1)
                return self.last(y), h.max()

        def step(model, x, k):
            if k == 4:
                x = x - 1e4  # makes the sigmoid zero
            y, m = model(x)
            (y.square().mean() if k % 2 else m).backward()
            return [y, m]

        self.check(Two, step, steps=8)

    def test_memory_within_a_budget(self):
        """A step with the expected answers stays within its budget."""
        class Deep(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

            def forward(self, x):
                for layer in self.layers:
                    x = torch.cumprod(1 + 0.01 * layer(x).tanh(), -1)
                return x.square().mean()

        _torch.meter_install()
        x = torch.randn(256, 64)
        model = remat.wrap(Deep(), (x,), budget="50% of activations")
        for _ in range(3):
            remat.of(model).release()
            before = _torch.meter_reset()
            model(x).backward()
            taken, memory = _torch.meter_peak() - before, remat.of(model).memory()
        self.assertLessEqual(memory["planned"], memory["budget"])
        self.assertLessEqual(taken, memory["planned"] - memory["held"])
        self.assertGreater(remat.of(model).plan["recomputed"], 0)


if __name__ == "__main__":
    unittest.main()
