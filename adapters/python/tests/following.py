# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of followed steps."""

import array
import collections
import functools
import io
import itertools
import types
import unittest

import emulated
import numpy
import torch
from torch import nn

import remat


class Net(nn.Module):
    """Layers with batch norm and dropout. Subclasses override `act`, which runs in the middle."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 48), nn.BatchNorm1d(48), nn.Linear(48, 16)
        self.drop = nn.Dropout(0.2)
        self.begin()

    def begin(self):
        pass

    def act(self, h):
        return h.tanh()

    def forward(self, x, *rest, **more):
        h = self.act(self.norm(self.first(x)))
        return self.last(self.drop(h))


class Shows(Net):
    """Calls `see` with an inner tensor."""

    def begin(self):
        self.see = None

    def act(self, h):
        y = h.tanh()
        if self.see is not None:
            self.see(y)
        return y


def backward(model, x, k):
    model(x).square().mean().backward()


def trained(make, step, steps, wrap):
    """Trains a model. Returns (model, results of its steps)."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if wrap is not None:
        remat.wrap(model, **{"budget": "100% of activations", "time_limit": 1, "gap": 0.9, "cache": False, **wrap})
    return model, left_by_steps(model, optimizer, step, steps)


def left_by_steps(model, optimizer, step, steps):
    """Runs steps. Returns per step: the result of `step`, parameters, gradients, buffers, and the states of the generators."""
    found = []
    for k in range(steps):
        torch.manual_seed(k + 1)
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        result = step(model, x, k)
        optimizer.step()
        tensors = [*(result or ()), *model.parameters(), *(p.grad for p in model.parameters()), *model.buffers(), emulated.random_state()]
        found.append([t if t is None else t.detach().cpu().clone() for t in tensors])
    return found


def same(a, b):
    return len(a) == len(b) and all((s is None) == (t is None) and (s is None or torch.equal(s, t)) for s, t in zip(a, b))


def run_together(threads):
    for t in threads:
        t.start()
    for t in threads:
        t.join()


class Test(unittest.TestCase):
    counts_plans = True

    def check(self, make, step=backward, steps=5, plans=True, **options):
        """Checks that planned steps equal plain steps, and whether there are plans at the end (None: not checked). @return the wrapped model"""
        _, plain = trained(make, step, steps, None)
        model, planned = trained(make, step, steps, options)
        for k, (a, b) in enumerate(zip(plain, planned, strict=True)):
            self.assertTrue(same(a, b), f"step {k}")
        if self.counts_plans and plans is not None:
            self.assertEqual(bool(remat.of(model).plans), plans)
        return model


class Configuration:
    scale = 2.0


class Scaled:
    def __init__(self):
        self.scale = 2.0

    def __call__(self, h):
        return h * self.scale


GLOBAL = 2.0


def nested(depth, value):
    return {"a": nested(depth - 1, value)} if depth else value


def innermost(d):
    while isinstance(d["a"], dict):
        d = d["a"]
    return d


def cell():
    value = [2.0]
    return (lambda: value[0]), (lambda v: value.__setitem__(0, v))


def set_global(model, v):
    global GLOBAL
    GLOBAL = v


#: per kind of state: (function that makes the state, function that reads its number, function that changes it)
STATES = {
    "number": (lambda m: setattr(m, "s", 2.0), lambda m: m.s, lambda m, v: setattr(m, "s", v)),
    "numpy array": (lambda m: setattr(m, "s", numpy.array([2.0])), lambda m: float(m.s[0]), lambda m, v: m.s.__setitem__(0, v)),
    "array": (lambda m: setattr(m, "s", array.array("d", [2.0])), lambda m: m.s[0], lambda m, v: m.s.__setitem__(0, v)),
    "class attribute": (lambda m: setattr(type(m), "s", 2.0), lambda m: m.s, lambda m, v: setattr(type(m), "s", v)),
    "class": (lambda m: setattr(Configuration, "scale", 2.0), lambda m: Configuration.scale, lambda m, v: setattr(Configuration, "scale", v)),
    "global": (lambda m: set_global(m, 2.0), lambda m: GLOBAL, set_global),
    "nested": (lambda m: setattr(m, "s", nested(9, 2.0)), lambda m: innermost(m.s)["a"], lambda m, v: innermost(m.s).__setitem__("a", v)),
    "deque": (lambda m: setattr(m, "s", collections.deque([2.0])), lambda m: m.s[0], lambda m, v: m.s.__setitem__(0, v)),
    "closure": (lambda m: setattr(m, "s", cell()), lambda m: m.s[0](), lambda m, v: m.s[1](v)),
    "object": (lambda m: setattr(m, "s", Scaled()), lambda m: m.s.scale, lambda m, v: setattr(m.s, "scale", v)),
    "bound method": (lambda m: setattr(m, "s", Scaled().__call__), lambda m: m.s(1.0), lambda m, v: setattr(m.s.__self__, "scale", v)),
    "partial": (lambda m: setattr(m, "s", functools.partial(float, 2.0)), lambda m: m.s(), lambda m, v: setattr(m, "s", functools.partial(float, v))),
    "iterator": (lambda m: setattr(m, "s", itertools.cycle([2.0, 3.0, 5.0])), lambda m: next(m.s), lambda m, v: next(m.s)),
    "generator": (lambda m: setattr(m, "s", (float(n) for n in itertools.count(2))), lambda m: next(m.s), lambda m, v: next(m.s)),
    "default of a function": (lambda m: setattr(m, "s", types.FunctionType((lambda v=2.0: v).__code__, {}, "f", (2.0,))), lambda m: m.s(),
                              lambda m, v: setattr(m.s, "__defaults__", (v,))),
    "file": (lambda m: setattr(m, "s", io.StringIO("2.0")), lambda m: float(m.s.getvalue()), lambda m, v: setattr(m, "s", io.StringIO(str(v)))),
    "plain tensor": (lambda m: setattr(m, "s", [torch.tensor(2.0)]), lambda m: m.s[0], lambda m, v: m.s[0].fill_(v)),
    "other tensor": (lambda m: setattr(m, "s", [torch.tensor(2.0)]), lambda m: m.s[0], lambda m, v: m.s.__setitem__(0, torch.tensor(v))),
}
