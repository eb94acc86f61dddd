# SPDX-License-Identifier: Apache-2.0
"""Sessions: exceptions of signal handlers, closed sessions, and optimizers of users."""

import signal
import unittest

import torch
from torch import nn

import remat

DEVICE = remat.Roofline(1e11, 1e10)


class Momentum(torch.optim.Optimizer):
    """An optimizer whose constructor has arguments of its own."""

    def __init__(self, params, rate):
        super().__init__(params, {"rate": rate})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                moving = self.state[p].setdefault("moving", torch.zeros_like(p))
                p.sub_(moving.mul_(0.9).add_(p.grad), alpha=group["rate"])


class Interrupted(Exception):
    pass


class Sessions(unittest.TestCase):
    def test_exceptions_of_signal_handlers(self):
        """An exception leaves the search, which would run for a minute."""
        def handler(*_):
            raise Interrupted

        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64 + i), nn.GELU(), nn.Linear(64 + i, 32)) for i in range(60)))
        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with self.assertRaises(Interrupted):
                remat.plan(model, (torch.randn(64, 32),), budget="60% of activations", time_limit=60, gap=0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def test_states_of_an_optimizer(self):
        model = nn.Linear(8, 8)
        found = remat.fit(model, (torch.randn(4, 8),), device=DEVICE, optimizer=Momentum(model.parameters(), 0.1), budget="1 GiB")
        self.assertEqual(found.sizes["optimizer"], sum(p.nbytes for p in model.parameters()))

    def test_a_budget_for_a_closed_session(self):
        model = remat.wrap(nn.Linear(8, 8), cache=False)
        session = remat.of(model)
        remat.unwrap(model)
        with self.assertRaisesRegex(remat.Error, "closed"):
            session.set_budget("90% of activations")
        self.assertFalse(remat.is_wrapped(model))


if __name__ == "__main__":
    unittest.main()
