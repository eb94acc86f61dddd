# SPDX-License-Identifier: Apache-2.0
"""Gradients to which other autograd graphs contribute. Planned steps add the summands in the order of plain PyTorch."""

import itertools
import logging
import unittest

import torch
from following import Net, Test, same, trained
from torch import nn

import remat


class Tied(Net):
    """A model that uses a weight several times."""

    def forward(self, x, *rest):
        h = self.act(self.norm(self.first(x)))
        h = self.drop(nn.functional.linear(h, self.first.weight.t()))
        return self.last(self.first(h + self.last(self.first(h))))


class Attention(Net):
    """A model that uses its inputs several times."""

    def forward(self, x, y=None):
        y = x if y is None else y
        score = torch.softmax(self.first(x) @ self.first(y).t(), -1)
        return self.last(self.drop(self.norm(self.first(score @ y)))).tanh() + (x * y).sin()


def pair(model, x, k):
    (model(x).square().mean() + model(x * 2).abs().mean()).backward()


def penalty(model, x, k):
    (model(x).square().mean() + 0.1 * model.first.weight.square().sum()).backward()


def penalty_now_and_then(model, x, k):
    (penalty if k % 3 == 1 else lambda m, x, k: m(x).square().mean().backward())(model, x, k)


def penalty_before(model, x, k):
    before = 0.1 * model.first.weight.square().sum()
    (before + model(x).square().mean()).backward()


def accumulated(model, x, k):
    for _ in range(3):
        pair(model, x, k)


def by_itself(model, x, k):
    weights = list(model.parameters())
    loss = model(x).square().mean() + sum(p.square().sum() for p in weights)
    return torch.autograd.grad(loss, weights)


def retained(model, x, k):
    loss = model(x).square().mean() + model(x + 1).mean()
    loss.backward(retain_graph=k < 3)


def hooked(model, x, k):
    seen = []
    weight = model.first.weight
    hooks = [weight.register_hook(lambda g: seen.append(g.clone())),
             weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))]
    pair(model, x, k)
    for hook in hooks:
        hook.remove()
    return seen


def around(model, x, k):
    """A residual connection around the module, as around a block of a larger model."""
    h = x.requires_grad_() * 2
    h = h + model(h)
    (h + model(h)).square().mean().backward()
    return [x.grad]


def same_input_twice(model, x, k):
    h = x.requires_grad_().sin()
    (model(h, h) * h).square().mean().backward()
    return [x.grad]


def leaf(model, x, k):
    """An input that is a leaf also gets gradients from other graphs."""
    y = torch.ones(32, 16, requires_grad=True)
    (model(x, y) + y).square().mean().backward()
    return [y.grad]


def parts_of_one(model, x, k):
    a, b = (x.requires_grad_() + 1).chunk(2, 1)
    (model(torch.cat([a, b], 1), torch.cat([b, a], 1)).square().mean() + a.mean()).backward()
    return [x.grad]


def recurrent(model, x, k):
    h = torch.zeros(32, 16)
    for _ in range(1 + k % 3):
        h = model(x, h).tanh() + h
    h.square().mean().backward()


STEPS = {Tied: [pair, penalty, penalty_now_and_then, penalty_before, accumulated, by_itself, retained, hooked],
         Attention: [around, same_input_twice, leaf, parts_of_one, recurrent]}
OPTIONS = [{"follow": False}, {"verify": 2}, {"budget": "70% of activations"}]


def with_loss(keep):
    """A step that gives its loss to `keep`, and with it the graph."""
    def step(model, x, k):
        loss = model(x).square().mean()
        keep(loss)
        loss.backward()
    return step


def as_list():
    losses = []
    return with_loss(losses.append)


def as_sum():
    total = 0

    def add(loss):
        nonlocal total
        total = total + loss
    return with_loss(add)


def as_outputs():
    outputs = []

    def step(model, x, k):
        outputs.append(model(x))
        outputs[-1].square().mean().backward()
    return step


def as_pairs():
    """Several kept losses with one backward."""
    losses = []

    def step(model, x, k):
        losses.append(model(x).square().mean())
        losses.append(model(x * 2).abs().mean())
        torch.autograd.backward(losses[-2:])
    return step


def as_sums_of_pairs():
    losses = []

    def step(model, x, k):
        losses.append(model(x).square().mean() + model(x * 2).abs().mean())
        losses[-1].backward()
    return step


def with_gradients_kept():
    losses = []

    def step(model, x, k):
        for part in range(3):
            losses.append(model(x + part).square().mean())
            losses[-1].backward()
    return step


def with_errors():
    """Backwards that fail: the second of a kept loss, and one whose hook raises."""
    losses = []

    def fail(gradient):
        raise ValueError("a hook")

    def step(model, x, k):
        outputs = model(x)
        if k == 3:
            outputs.register_hook(fail)
        losses.append(outputs.square().mean())
        try:
            losses[-1].backward()
            if k == 4:
                (losses[-1] + losses[-2]).backward()
        except (RuntimeError, ValueError):
            pass
    return step


class Sums(Test):
    def test_parameters(self):
        for step in STEPS[Tied]:
            with self.subTest(step=step.__name__):
                self.check(Tied, step, steps=6)

    def test_inputs(self):
        for step in STEPS[Attention]:
            with self.subTest(step=step.__name__):
                self.check(Attention, step, steps=6)

    def test_options(self):
        for (make, step), options in itertools.product(((Tied, pair), (Attention, around)), OPTIONS):
            with self.subTest(step=step.__name__, **options):
                self.check(make, step, steps=5, **options)

    def test_kept_graphs(self):
        """Graphs of earlier steps, which code keeps after their backward, do not count as other graphs."""
        for keep, plans in ((as_list, 1), (as_sum, 1), (as_outputs, 1), (as_pairs, 2), (as_sums_of_pairs, 2), (with_gradients_kept, 2), (with_errors, 2)):
            with self.subTest(keep=keep.__name__):
                _, plain = trained(Tied, keep(), 6, None)
                with self.assertNoLogs("remat", logging.WARNING):
                    model, planned = trained(Tied, keep(), 6, {"budget": "110% of activations"})
                self.assertLessEqual(len(remat.of(model).plans), plans)
                for k, (a, b) in enumerate(zip(plain, planned, strict=True)):
                    self.assertTrue(same(a, b), f"step {k}")

    def test_a_node_that_is_called_by_hand(self):
        """It gives the gradients, leaves `.grad` alone, and the next backward is whole."""
        names = []

        def step(model, x, k):
            outputs = model(x)
            if k == 3:
                names.append(outputs.grad_fn.name())
                outputs.square().mean().backward(retain_graph=True)
                before = [p.grad.clone() for p in model.parameters()]
                outputs.grad_fn(torch.ones_like(outputs))
                self.assertTrue(same(before, [p.grad for p in model.parameters()]))
                model.zero_grad()
            outputs.square().mean().backward()

        self.check(Net, step, plans=None)
        self.assertEqual(sum(name.startswith("Remat") for name in names), 1, names)  # of the planned model

    def test_what_does_not_fit(self):
        """A budget that fits only two of three summands. A warning says that results may differ."""
        class Large(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(400, 400) / 20)

            def forward(self, x):
                return ((x @ self.weight).tanh() @ self.weight.t()).tanh() @ self.weight

        def step(model):
            model.zero_grad()
            x = torch.linspace(-1, 1, 1600).reshape(4, 400)
            (model(x).square().mean() + model.weight.square().mean()).backward()
            return model.weight.grad.clone()

        torch.manual_seed(0)
        model = Large()
        expected = step(model)
        model.zero_grad()
        remat.wrap(model, cache=False)
        model(torch.ones(4, 400)).sum().backward()
        with_sums = remat.of(model).memory()["planned"] + model.weight.nbytes // 4
        model.zero_grad()
        remat.wrap(model, cache=False, budget=with_sums)
        with self.assertLogs("remat", logging.WARNING) as seen:
            found = [step(model) for _ in range(3)]
        self.assertEqual(len(seen.output), 2)
        self.assertRegex(seen.output[0], "the forward runs once more, for gradients in summands; this takes .* beyond the budget, in this step only")
        self.assertRegex(seen.output[1], "gradients do not fit into the budget as summands")
        for gradient in found:
            self.assertTrue(torch.allclose(gradient, expected))


if __name__ == "__main__":
    unittest.main()
