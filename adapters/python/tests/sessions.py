# SPDX-License-Identifier: Apache-2.0
"""Sessions: exceptions of signal handlers, closed sessions, optimizers of users, and memory outside of plans."""

import copy
import logging
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


@torch.library.custom_op("remat_tests::greedy", mutates_args=())
def greedy(x: torch.Tensor) -> torch.Tensor:
    """Takes 4 MiB for numbers above 1, which it does not meet when it is measured."""
    return x * (x.new_full((1 << 20,), 2.0)[0] if x.max() > 1 else 2.0)


@greedy.register_fake
def _(x):
    return torch.empty_like(x)


class Greedy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return (super().forward(x) * greedy(x)).square().mean()


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

    def test_ctrl_c_ends_calls_with_many_searches(self):
        def handler(*_):
            raise KeyboardInterrupt

        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64 + i), nn.GELU(), nn.Linear(64 + i, 32)) for i in range(60)))
        args = torch.randn(64, 32),
        before = signal.signal(signal.SIGALRM, handler)
        try:
            for take in (lambda: remat.fit(model, args, device=DEVICE), lambda: remat.curve(model, args, device=DEVICE, gap=0),
                         lambda: remat.largest(lambda n: torch.zeros(n, 32), model, device=DEVICE, budget="1 MiB")):
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                with self.assertRaises(KeyboardInterrupt):
                    take()
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

    def test_memory_outside_of_the_plan(self):
        """A warning names the operator once, unless the budget has room for that memory."""
        torch.manual_seed(0)
        plain, x = Greedy(), torch.randn(64, 32)
        plain(x).backward()
        for budget, warned in (("100% of activations", True), ("1 GiB", False)):
            model = remat.wrap(copy.deepcopy(plain), budget=budget, cache=False)
            with self.subTest(budget), self.assertLogs("remat", logging.WARNING) if warned else self.assertNoLogs("remat", logging.WARNING) as told:
                for _ in range(3):
                    model.zero_grad()
                    model(x).backward()
            self.assertTrue(all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)))
            self.assertGreaterEqual(remat.of(model).memory()["unplanned"], 4 << 20)
            self.assertRegex(remat.of(model).report(), r"outside of the plan +4[.\d]* MiB, by remat_tests::greedy")
            if warned:
                self.assertEqual(len(told.output), 1)
                self.assertIn("remat_tests::greedy (sessions.py:", told.output[0])
                self.assertIn("beyond the budget", told.output[0])

    def test_groups_that_no_fused_kernel_supports(self):
        def stepped(make):
            torch.manual_seed(0)
            weights = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, dtype=torch.complex64)), nn.Parameter(torch.randn(6))]
            optimizer = make(weights[:1])
            optimizer.add_param_group({"params": weights[1]})
            optimizer.add_param_group({"params": weights[2], "foreach": True})
            optimizer = copy.deepcopy(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.randn_like(p)
            optimizer.step()
            return [p.detach() for group in optimizer.param_groups for p in group["params"]]

        for cls in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
            with self.subTest(cls.__name__):
                plain, ours = stepped(lambda p: cls(p, 0.1, foreach=False)), stepped(lambda p: remat.optimizer(p, cls, lr=0.1))
                self.assertTrue(all(map(torch.equal, plain, ours)))
        positional = 0.1, 0.0, 0.0, 0.0, 1e-10, True
        plain, ours = (stepped(lambda p: cls(p, *positional)) for cls in (torch.optim.Adagrad, remat.offloaded(torch.optim.Adagrad)))
        self.assertTrue(all(map(torch.equal, plain, ours)))


if __name__ == "__main__":
    unittest.main()
