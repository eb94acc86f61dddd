# SPDX-License-Identifier: Apache-2.0
"""Custom backwards with side effects. They run exactly once per step, as in plain PyTorch."""

import functools
import logging
import math
import unittest

import torch

import remat
from following import Net, Test

COUNT = 0
ROWS = []


class Tracker:
    def __init__(self):
        self.calls = 0

    def tick(self):
        self.calls += 1
        return self.calls

    def scale(self):
        return 2.0 + self.calls

    @property
    def next(self):
        return self.tick()


class Counted:
    made = 0

    def __init__(self):
        Counted.made += 1
        self.number = Counted.made


class Pair:
    def __init__(self, gradient):
        self.rows, self.gradient = [], gradient


def put(rows, gradient):
    rows.append(gradient)


def kept(gradient):
    ROWS.append(gradient)
    return gradient


def doubled(gradient, times=2):
    return gradient * times


def passed_on(f):
    @functools.wraps(f)
    def wrapped(*args):
        return f(*args)

    return wrapped


def counted(f):
    @functools.wraps(f)
    def wrapped(*args):
        ROWS.append(args[-1])
        return f(*args)

    return wrapped


class Pure:
    """Backwards without side effects. They are planned."""

    def changes_copies(ctx, g):
        x, = ctx.saved_tensors
        out = g.clone()
        out[x < 0] = 0
        return out

    def fills_containers(ctx, g):
        parts, named = [None] * 2, {}
        parts[0] = g
        parts.extend(g * k for k in range(2))
        named["a"] = g
        named.setdefault("b", parts[0])
        return named["a"] + named["b"]

    def calls_functions(ctx, g):
        def twice(a):
            return a * 2

        return doubled(twice(g), times=math.sqrt(2)) + torch.nn.functional.relu(g) + torch.ops.aten.mul(g, 2)

    def reads_the_module(ctx, g):
        return g * ctx.model.tracker.scale() + ctx.model.last.bias.sum() if ctx.needs_input_grad[0] else None

    def inner_gradient(ctx, g):
        x, = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x.sin()
        return torch.autograd.grad(y, x, g)[0]

    def makes_objects(ctx, g):
        rows = list(ctx.model.rows)
        rows.append(Pair(g).gradient + 1)
        for row in [g, rows[0]]:
            row = row * 2
        return row

    def notes_on_its_context(ctx, g):
        ctx.gradient = g
        return g

    @torch.autograd.function.once_differentiable
    def decorated(ctx, g):
        return g * 2

    @passed_on
    def decorated_by_the_user(ctx, g):
        return g * ctx.model.tracker.scale()


class Impure:
    """Backwards with side effects: they count, keep tensors, or run other backwards."""

    def counts(ctx, g):
        ctx.model.tracker.calls += 1
        return g * ctx.model.tracker.calls

    def counts_globally(ctx, g):
        global COUNT
        COUNT += 1
        return g * COUNT

    def counts_in_a_method(ctx, g):
        return g * ctx.model.tracker.tick()

    def counts_in_a_property(ctx, g):
        return g * ctx.model.tracker.next

    def counts_in_an_iterator(ctx, g):
        return g * next(ctx.model.numbers)

    def loops_over_an_iterator(ctx, g):
        for number in ctx.model.numbers:
            return g * number

    def keeps_a_gradient(ctx, g):
        ctx.model.kept = g.clone()
        return g

    def averages(ctx, g):
        ctx.model.kept = ctx.model.kept * 0.9 + g.norm()
        return g * ctx.model.kept

    def appends(ctx, g):
        rows = ctx.model.rows
        rows.append(g.norm())
        return g * len(rows)

    def appends_to_a_part(ctx, g):
        rows = ctx.model.lists[g.dim() - 2]
        rows.append(g.norm())
        return g * len(rows)

    def appends_in_a_loop(ctx, g):
        for rows, _ in zip(ctx.model.lists, range(2)):
            rows.append(g.norm())
        return g * len(rows)

    def appends_to_what_it_unpacks(ctx, g):
        (rows,), factor = ctx.model.lists, 2
        rows.append(g.norm())
        return g * factor * len(rows)

    def appends_under_another_name(ctx, g):
        lists = ctx.model.lists
        others = lists
        (rows := others[0] if g.dim() else []).append(g.norm())
        return g * len(rows)

    def appends_to_an_argument(ctx, g):
        put(ctx.model.lists[g.dim() - 2], g.norm())
        return g * len(ctx.model.lists[0])

    def counts_in_a_constructor(ctx, g):
        return g * Counted().number

    def changes_the_module(ctx, g):
        ctx.model.register_buffer("last_gradient", g.norm())
        return g * ctx.model.last_gradient

    def appends_in_a_function(ctx, g):
        return kept(g) * len(ROWS)

    def appends_later(ctx, g):
        def add():
            ctx.model.rows.append(g)

        add()
        return g * len(ctx.model.rows)

    def runs_another_backward(ctx, g):
        x, = ctx.saved_tensors
        with torch.enable_grad():
            x.requires_grad = True
            ctx.model.inside(x).backward(g)
        return x.grad

    def runs_one_of_its_context(ctx, g):
        with torch.enable_grad():
            ctx.inside = ctx.model.inside(g.detach()).sum()
            ctx.model.inside.weight.sum().backward()
        return g

    def writes_gradients(ctx, g):
        x, = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            weight = ctx.model.inside.weight
            gx, gw = torch.autograd.grad(ctx.model.inside(x), [x, weight], g)
        weight.grad = gw if weight.grad is None else weight.grad + gw
        return gx

    @counted
    def counts_in_a_decorator(ctx, g):
        return g * len(ROWS)

    def cannot_be_read(ctx, g):
        return g * ctx.model.unknown[0](g)


def functions(of):
    return [(name, f) for name, f in vars(of).items() if not name.startswith("_")]


def model_with(f):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, model):
            ctx.model = model
            ctx.save_for_backward(x.detach())
            return x * 2

        @staticmethod
        @functools.wraps(f)
        def backward(ctx, g):
            return f(ctx, g), None

    class Applies(Net):
        def begin(self):
            global COUNT
            COUNT = Counted.made = 0
            ROWS.clear()
            self.tracker, self.rows, self.lists, self.numbers, self.kept = Tracker(), [], [[]], iter(range(1, 99)), torch.zeros(())
            self.inside = torch.nn.Linear(48, 48)
            self.unknown = {0: eval("lambda g: g.numel()")}

        def act(self, h):
            return Function.apply(h.tanh(), self)

    return Applies


def step(model, x, k):
    model(x).square().mean().backward()
    return [torch.tensor([COUNT, len(ROWS), model.tracker.calls]), model.kept, *model.rows, *model.lists[0], *ROWS]


class CustomBackwards(Test):
    def test_without_effects(self):
        for name, f in functions(Pure):
            with self.subTest(name), self.assertNoLogs("remat", logging.WARNING):
                model = self.check(model_with(f), step)
                self.assertEqual(len(remat.of(model).plans), 1)

    def test_with_effects(self):
        for name, f in functions(Impure):
            with self.subTest(name), self.assertLogs("remat", logging.WARNING) as told:
                self.check(model_with(f), step, plans=False)
            self.assertIn("not planned: the backward of", told.output[0])

    def test_refused(self):
        """With on_refuse="raise" the error comes before any computation."""
        model = remat.wrap(model_with(Impure.counts)(), on_refuse="raise", cache=False)
        with self.assertRaisesRegex(remat.Refused, "writes ctx.model.tracker.calls"):
            model(torch.ones(2, 16))
        self.assertEqual(model.tracker.calls, 0)


if __name__ == "__main__":
    unittest.main()
