# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of hostile models."""

import emulated
import pytest
import torch
from differential import assert_same, content, train
from torch import nn

import remat


class Deep(nn.Module):
    """A stack of layers. Tests insert a function in the middle."""

    def __init__(self, middle=lambda self, x: x, prepare=lambda self: None):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.middle = middle
        prepare(self)

    def forward(self, x, **more):
        x = self.first(x).sin().exp().tanh()
        x = self.middle(self, x, **more)
        leaves = torch.utils._pytree.tree_map(lambda t: t if t is None else self.second(t).sin().exp().tanh().sin().cos(), x)
        return leaves


def batches(steps=4, **more):
    g = emulated.generator(1)
    return [{"x": torch.randn(40, 6, generator=g)} | more for _ in range(steps)]


def made(*args):
    torch.manual_seed(0)
    return Deep(*args)


BUDGETS = ("100% of activations", "75% of activations")


def compare(make, data=batches, **how):
    """Trains a plain model, and a wrapped model per budget. Checks that they are equal and returns the wrapped models."""
    plain = train(make(), data(), **how)
    models = []
    for budget in BUDGETS:
        model = remat.wrap(make(), budget=budget, time_limit=1, gap=0.9)
        try:
            steps = train(model, data(), **how)
        except remat.OverBudget as e:
            model = remat.wrap(make(), budget=e.needed, time_limit=1, gap=0.9)
            steps = train(model, data(), **how)
        assert_same(plain, steps)
        models.append(model)
    return models


def refused(make, data=batches, match=None, **how):
    """Checks that followed steps equal eager mode, and that a replayed forward (follow=False) is refused without side effects."""
    compare(make, data, **how)
    for budget in BUDGETS:
        model = remat.wrap(make(), budget=budget, time_limit=1, gap=0.9, follow=False, on_refuse="raise")
        state = {n: content(t) for n, t in model.state_dict().items()}
        generator = emulated.random_state()
        inputs = data()[0]
        before = {n: content(t) for n, t in inputs.items()}
        with pytest.raises(remat.Refused, match=match) as e:
            model(**inputs)
        assert {n: content(t) for n, t in model.state_dict().items()} == state
        assert {n: content(t) for n, t in inputs.items()} == before
        assert torch.equal(generator, emulated.random_state())
    plain = train(make(), data(), **how)
    assert_same(plain, train(remat.wrap(make(), budget="75% of activations", time_limit=1, gap=0.9, follow=False), data(), **how))
    return e.value
