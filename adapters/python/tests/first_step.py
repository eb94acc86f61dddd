# SPDX-License-Identifier: Apache-2.0
"""The first step, which is planned before the loss is known, and steps of new sizes."""

import logging
import unittest

import torch
from torch import nn

import remat
from following import Test
from remat import _torch

SIZE = 1024 * 32 * 4  # bytes of the result


class Keys(nn.Module):
    """Returns the outputs of all layers, the result, and a loss if there are targets, as language models do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6))

    def forward(self, x, targets=None):
        keys = []
        for layer in self.layers:
            keys.append(layer[:2](x))
            x = x + layer[2:](keys[-1])
        return (x, keys) if targets is None else ((x - targets).square().mean(), x, keys)


class Sampled(nn.Module):
    """Returns its result and the activations that the result is computed from."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x, targets=None):
        mean, deviation = self.encode(x).chunk(2, 1)
        return self.decode(mean + deviation * 0.5), mean, deviation


class Remembers(nn.Module):
    """Makes a table in its first forward, counts its calls, and keeps a state from call to call."""

    def __init__(self):
        super().__init__()
        self.layer, self.out, self.calls, self.state = nn.Linear(32, 64), nn.Linear(64, 32), 0, None
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        if len(self.table) != len(x):
            self.table = torch.arange(float(len(x))).repeat_interleave(1)
        h = self.layer(x).tanh() + self.table[:, None] / len(x)
        h = h if self.state is None else h + self.state / self.calls
        self.state = h.detach().mean(0)
        return self.out(h.tanh()).square().mean()


def with_loss(model, x):
    return model(x, x)[0]


def with_result(model, x):
    return model(x)[0].mean()


def with_keys(model, x):
    result, keys = model(x)
    return result.mean() + keys[2].mean()


def with_all_keys(model, x):
    result, keys = model(x)
    return result.mean() + sum(key.square().mean() for key in keys)


def with_all(model, x):
    result, mean, deviation = model(x)
    return result.square().mean() + mean.square().mean() + deviation.exp().mean()


def trained(make, loss, wrap):
    """Trains a model. Returns (model, peak of each step beyond the bytes before it, losses and gradients)."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(1024, 32)
    _torch.meter_install()
    if wrap:
        remat.wrap(model, time_limit=1, gap=0.9, cache=False, **wrap)
    peaks, found = [], []
    for _ in range(3):
        model.zero_grad()
        if wrap:
            remat.of(model).release()
        before = _torch.meter_reset()
        value = loss(model, x)
        value.backward()
        peaks.append(_torch.meter_peak() - before)
        found.append([value.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
        del value
    return model, peaks, found


class Waves(nn.Module):
    """Computes a series of values from its input alone, and reads some of them."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x):
        positive = x.sum(1) > 0
        for _ in range(20):
            x = (x * 1.01).sin()
        return self.last(self.inner(x[positive]).relu() * float(x.mean()))


class Frozen(nn.Module):
    """Layers behind a frozen attention, which computes from the input alone and reads one tensor as query, key and value."""

    def __init__(self, training):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True).requires_grad_(False).train(training)
        self.layers = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))])

    def forward(self, x):
        x = x.view(8, 128, 32)
        return self.layers(self.attention(x, x, x, need_weights=False)[0]).square().mean()


class FirstStep(Test):
    own = 0  # bytes of the module and of its input

    def planned(self, make, loss, **wrap):
        """Checks that training equals plain training. Returns (session, peaks of the steps)."""
        _, _, expected = trained(make, loss, {})
        model, peaks, found = trained(make, loss, wrap)
        for a, b in zip(expected, found, strict=True):
            self.assertTrue(all(map(torch.equal, a, b)))
        self.own = sum(p.nbytes for p in model.parameters()) + SIZE
        return remat.of(model), peaks

    def within(self, session, peaks):
        """Checks all peaks: at most the budget without the bytes that the module holds, plus the bytes that the loss itself needs."""
        for peak in peaks:
            self.assertLess(peak, session.memory()["budget"] - self.own + SIZE)

    def test_a_model_that_returns_its_loss(self):
        """Only the loss is expected to get a gradient. There is one plan, and the first step stays inside the budget."""
        for follow in (True, False):
            with self.subTest(follow=follow), self.assertNoLogs("remat", logging.WARNING):
                session, peaks = self.planned(Keys, with_loss, budget="40% of activations", follow=follow)
                self.assertEqual(len(session.plans), 1)
                self.within(session, peaks)

    def test_outputs_that_other_outputs_come_from(self):
        """Outputs that feed other outputs also get gradients, already in the plan of the first step."""
        session, _ = self.planned(Sampled, with_all, budget="100% of activations")
        self.assertEqual(len(session.plans), 1)

    def test_no_room_for_gradients_of_all_outputs(self):
        """If gradients of all outputs do not fit, only outputs that feed no other output are expected to get gradients."""
        with self.assertNoLogs("remat", logging.WARNING):
            self.within(*self.planned(Keys, with_result, budget="40% of activations"))

    def test_other_outputs_than_expected(self):
        """If the loss uses other outputs than expected, the forward runs again. A warning tells if the old outputs do not fit beside it."""
        with self.assertNoLogs("remat", logging.WARNING):
            self.planned(Keys, with_keys, budget="100% of activations")
        with self.assertLogs("remat", logging.WARNING) as told:
            self.planned(Keys, with_keys, budget="40% of activations")
        self.assertIn("The outputs of before take", told.output[0])

    def test_other_outputs_that_do_not_fit(self):
        """The forward of the first step has already run, so this step exceeds the budget. The next forward raises OverBudget."""
        _, _, expected = trained(Keys, with_all_keys, {})
        torch.manual_seed(0)
        model, x = Keys(), torch.randn(1024, 32)
        remat.wrap(model, time_limit=1, gap=0.9, cache=False, budget="38% of activations")
        with self.assertLogs("remat", logging.WARNING) as told:
            with_all_keys(model, x).backward()
        self.assertIn("for another use of its outputs", told.output[1])
        self.assertTrue(all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected[0][1:], strict=True)))
        with self.assertRaises(remat.OverBudget):
            model(x)

    def test_a_step_without_room_leaves_no_trace(self):
        """A call that raises OverBudget leaves the attributes of the model as they were, also after planned steps."""
        def left_by(step):
            torch.manual_seed(0)
            model = Remembers()
            for x in torch.randn(4, 64, 32):
                model.zero_grad()
                step(model, x)
            return [model.calls, model.table, model.state, *(p.grad for p in model.parameters())]

        def refused_first(model, x):
            if not remat.is_wrapped(model):
                remat.wrap(model, cache=False)
            remat.of(model).set_budget(1)
            for _ in range(2):
                with self.assertRaises(remat.OverBudget):
                    model(x)
            remat.of(model).set_budget("100% of activations")
            model(x).backward()

        plain, planned = left_by(lambda model, x: model(x).backward()), left_by(refused_first)
        self.assertEqual(plain[0], planned[0])
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain[1:], planned[1:], strict=True)))

    def test_frozen_attention(self):
        for training in (True, False):
            with self.subTest(training=training), self.assertNoLogs("remat", logging.WARNING):
                session, peaks = self.planned(lambda: Frozen(training), lambda model, x: model(x), budget="70% of activations")
                self.within(session, peaks)
                self.assertEqual(session.memory()["unplanned"], 0)

    def test_a_new_size_keeps_few_values_of_the_input(self):
        """A step of a new size keeps only a few of the 40 values of 460 kB each."""
        peaks = []

        def step(model, x, k):
            x = torch.randn(1800 + k, 64)
            if remat.is_wrapped(model):
                remat.of(model).release()
            before = _torch.meter_reset()
            model(x).square().mean().backward()
            peaks.append(_torch.meter_peak() - before)

        _torch.meter_install()
        self.check(Waves, step, on_refuse="raise")
        plain, planned = peaks[:5], peaks[5:]
        self.assertLessEqual(max(planned[1:]), max(plain) + (3 << 20), peaks)


if __name__ == "__main__":
    unittest.main()
