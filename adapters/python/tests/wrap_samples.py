# SPDX-License-Identifier: Apache-2.0
"""`wrap` with the arguments of a step plans this step at once, and undoes all its side effects."""

import dataclasses
import itertools
import logging
import random
import unittest

import numpy
import torch
from torch import nn

import remat
from following import Net, left_by_steps, same


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


def one(model, x):
    model(x).square().mean().backward()


class Kept(Net):
    """A model that keeps an activation until the next step."""

    def begin(self):
        self.state = torch.zeros(32, 48)

    def act(self, h):
        self.state = (0.5 * self.state + h).detach()
        return (h + self.state).tanh()


def acting(act, **state):
    def begin(self):
        for name, make in state.items():
            setattr(self, name, make())

    return type("Acting", (Net,), {"begin": begin, "act": act})


def counts(self, h):
    self.steps += 1
    self.seen.append(h.shape)
    self.sum += self.steps
    return h * self.steps


def looks(self, h):
    return h * float(h.detach().abs().max()) if h.sum() > 0 else h.tanh()


def draws(self, h):
    return h * random.random() + float(numpy.random.rand()) + self.own.random() + torch.rand_like(h)


def masked(self, h):
    return h + 0.001 * h[h > 0].sum()


SHAPES = {
    "nothing": Net,
    "counters": acting(counts, steps=int, seen=list, sum=lambda: torch.zeros(())),
    "values": acting(looks),
    "draws": acting(draws, own=lambda: random.Random(7)),
    "masks": acting(masked),
    "a state": Kept,
    "a first call": acting(lambda self, h: h * self.__dict__.setdefault("found", float(h.detach().std()))),
}


def steps_of(make, wrap, step, sample):
    torch.manual_seed(0)
    random.seed(1)
    numpy.random.seed(2)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if wrap is not None:
        at = torch.get_rng_state()
        remat.wrap(model, sample, budget="100% of activations", cache=False, planner=remat.Planner(time_limit=1), **wrap)
        assert torch.equal(torch.get_rng_state(), at)
    return model, left_by_steps(model, optimizer, step, 5)


class Samples(unittest.TestCase):
    def check(self, make, step=lambda model, x, k: one(model, x), sample=None, planned=True, **options):
        sample = (torch.randn(32, 16),) if sample is None else sample
        _, plain = steps_of(make, None, step, sample)
        with self.assertLogs("remat", logging.INFO) as seen:
            model, found = steps_of(make, options, step, sample)
        for k, (a, b) in enumerate(zip(plain, found, strict=True)):
            self.assertTrue(same(a, b), f"step {k}")
        self.assertFalse([m for m in seen.output if "WARNING" in m])
        self.assertEqual(any("the first call says" in m for m in seen.output), not planned)
        self.assertTrue(remat.of(model).plans)

    def test_models(self):
        for choice in ("warn", "raise"):
            for name, make in SHAPES.items():
                with self.subTest(name, on_refuse=choice):
                    self.check(make, on_refuse=choice)

    def test_arguments(self):
        """Arguments of a type that cannot be rebuilt with other tensors, and arguments that the forward writes."""
        class Takes(Net):
            def forward(self, batch, more):
                more["calls"] = more.get("calls", 0) + 1
                return super().forward(batch.x) * next(more["numbers"])

        def step(model, x, k):
            one(lambda x: model(Batch(x), {"numbers": itertools.count(k + 1)}), x)

        self.check(Takes, step, sample=(Batch(torch.randn(32, 16)), {"numbers": itertools.count(1)}))

    def test_errors(self):
        """An error of the forward reaches the caller and leaves the model unchanged. A budget that is too small is refused at once."""
        class Raises(Net):
            def begin(self):
                self.calls = 0

            def act(self, h):
                self.calls += 1
                raise KeyError("the model says so")

        model = Raises()
        with self.assertRaisesRegex(KeyError, "the model says so"):
            remat.wrap(model, (torch.randn(32, 16),))
        self.assertEqual(model.calls, 0)
        with self.assertRaises(remat.OverBudget):
            remat.wrap(Net(), (torch.randn(32, 16),), budget=1000)

    def test_estimates(self):
        """`plan`, `fit` and `curve` undo all changes by the forward, also on `meta`. A forward that cannot be recorded is an error."""
        for name in ("nothing", "counters", "draws", "a state"):
            for on in ("cpu", "meta"):
                with self.subTest(name, on=on), torch.device(on):
                    model, x = SHAPES[name](), (torch.randn(32, 16),)
                    drawn = random.getstate()
                    for estimate in (remat.plan, remat.fit, remat.curve):
                        estimate(model, x, device="a100-sxm-40gb")
                    self.assertEqual((getattr(model, "steps", 0), getattr(model, "seen", []), random.getstate()), (0, [], drawn))
                    self.assertTrue(name != "a state" or model.state.device.type == on)
        with self.assertRaisesRegex(remat.Refused, "sparse"):
            remat.plan(acting(lambda self, h: h + h.detach().to_sparse().to_dense())(), (torch.randn(32, 16),))

    def test_without_the_code(self):
        """With follow=False, `wrap` undoes the side effects of the sample step, too."""
        model = SHAPES["counters"]()
        with self.assertLogs("remat", logging.INFO):
            remat.wrap(model, (torch.randn(32, 16),), planner=remat.Planner(follow=False))
        self.assertEqual((model.steps, model.seen), (0, []))


if __name__ == "__main__":
    unittest.main()
