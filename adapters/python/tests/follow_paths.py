# SPDX-License-Identifier: Apache-2.0
"""Steps that leave all known paths. They are recorded from there on, and equal eager mode bit by bit."""

import contextlib
import logging
import os
import random
import threading
import unittest

import torch
from following import Net, Test, backward, run_together, same, trained
from torch import nn

import remat
from remat import _torch


class Paths(Test):
    def planned(self, make, step=backward, steps=8):
        """Like `check`, and fails on a warning: no step may run unplanned."""
        with self.assertNoLogs("remat", logging.WARNING):
            return self.check(make, step, steps)

    def test_layers_that_are_dropped(self):
        """More new paths than are kept, with buffers, draws and constants before and behind the point where the paths part."""
        class Drops(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers, self.last = nn.ModuleList(nn.Linear(16, 16) for _ in range(6)), nn.Linear(16, 16)
                self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.2)
                self.random = random.Random(1)

            def forward(self, x):
                for layer in self.layers:
                    if self.random.random() < 0.4:
                        x = self.norm(x + self.drop(layer(x)).tanh())
                scale = self.random.choice((1, 2))
                return self.last(x if scale == 1 else x * torch.tensor(float(scale) + self.random.random()))

        self.planned(Drops, steps=30)

    def test_what_is_new(self):
        """Changes from some step on: a shorter or longer path, another operator, a kept tensor, a written buffer."""
        def shorter(model, h, new):
            return h if new else h.tanh().relu()

        def longer(model, h, new):
            return h.tanh().relu() if new else h.tanh()

        def other(model, h, new):
            return h.relu() if new else h.tanh()

        def kept(model, h, new):
            y = h.tanh()
            model.kept = y.detach() if new else None
            return y

        def written(model, h, new):
            return model.norm(h) if new else h

        def in_place(model, h, new):
            return h.mul(2).relu_() if new else h.mul(2)

        def drawn(model, h, new):
            return h * torch.rand_like(h) if new else h

        def from_constants(model, h, new):
            table = torch.arange(48.0).sin()
            return h + (table.add_(h.detach().mean()) if new else table)

        def inner_gradient(model, h, new):
            leaf = h.detach().requires_grad_()
            (g,) = torch.autograd.grad(leaf.square().sum() if new else leaf.tanh().sum(), leaf)
            return h * g

        def turned(model, h, new):  # recurrent layers with `batch_first` do so
            h = h.mul(2).unsqueeze_(0).transpose_(1, 2).tanh().squeeze(0).t()
            return h.relu() if new else h

        for act in (shorter, longer, other, kept, written, in_place, drawn, from_constants, inner_gradient, turned):
            class Changes(Net):
                def begin(self):
                    self.steps, self.kept = 0, None

                def act(self, h):
                    self.steps += 1
                    return act(self, h, self.steps in (3, 4, 6))

            with self.subTest(act.__name__):
                self.planned(Changes, lambda m, x, k: (backward(m, x, k), [] if m.kept is None else [m.kept])[1])

    def test_a_path_beyond_the_budget_is_searched_once(self):
        class Grows(Net):
            def begin(self):
                self.wide = False

            def act(self, h):
                return torch.cat([h.tanh() * k for k in range(1, 9)], 1).view(-1, 8, 48).sum(1) if self.wide else h

        def step(model, x, k):
            model.wide = k > 0
            with self.assertNoLogs("remat", logging.INFO) if remat.is_wrapped(model) and k > 3 else contextlib.nullcontext():
                backward(model, x, k)

        with self.assertRaises(remat.OverBudget) as seen:
            trained(Grows, backward, 1, {"budget": 1})
        with self.assertLogs("remat", logging.WARNING):
            self.check(Grows, step, steps=6, budget=seen.exception.needed)

    def test_what_cannot_be_recorded(self):
        """Steps that make a sparse tensor run unplanned. The other steps stay planned."""
        class Sparse(Net):
            def begin(self):
                self.steps = 0

            def act(self, h):
                self.steps += 1
                return h.tanh() + h.detach().to_sparse().to_dense().tanh() if self.steps in (3, 5, 6) else h.tanh()

        with self.assertLogs("remat", logging.WARNING) as seen:
            self.check(Sparse, steps=9)
        self.assertEqual(len(seen.output), 1)
        self.assertIn("sparse", seen.output[0])

    def test_values_that_a_backward_asks_for(self):
        """The backward of cumprod asks whether an input is zero."""
        class Products(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(16))

            def forward(self, x):
                return torch.cumprod(x, 0) * self.scale

        def step(model, x, k):
            x = x.abs() + 0.5
            if k in (2, 3):
                x[1, 2] = 0
            backward(model, x.requires_grad_(), k)
            return [x.grad]

        self.check(Products, step, steps=6)

    def test_errors(self):
        """A forward raises, on a known path or after a new operator. The next steps equal eager mode."""
        class Raises(Net):
            def begin(self):
                self.steps = 0

            def act(self, h):
                self.steps += 1
                y = self.norm(h).relu() if self.steps == 5 else h.tanh()
                if self.steps in (3, 5):
                    raise ValueError("on purpose")
                return y

        def step(model, x, k):
            try:
                backward(model, x, k)
            except ValueError:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)

        self.planned(Raises, step)

    def test_memory_of_what_runs_as_it_is(self):
        """An unplanned step needs the memory of eager mode: the arena is freed, and no result lives longer."""
        class Ends(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))
                self.steps = 0

            def forward(self, x):
                self.steps += 1
                for layer in self.layers:
                    x = layer(x).tanh().sin()
                if self.steps == 4:
                    self.end(x)
                return x

        def raises(self, x):
            raise ValueError

        def sparse(self, x):
            x.detach()[:2].to_sparse()

        def peak(make, **options):
            model, x = make(), torch.randn(2048, 64)
            before = _torch.meter_reset()
            if options:
                remat.wrap(model, cache=False, **options)
            for _ in range(4):
                with contextlib.suppress(ValueError):
                    _torch.meter_reset()
                    model(x).sum().backward()
                model.zero_grad()
            return _torch.meter_peak() - before

        for end in (raises, sparse):
            make = type("Ends", (Ends,), {"end": end})
            with self.subTest(end), self.assertLogs("remat", logging.WARNING) as seen:
                _torch.meter_install()
                self.assertLess(peak(make, budget="60% of activations"), peak(make) + (1 << 19))
            self.assertEqual(len(seen.output), 1)
            self.assertRegex(seen.output[0], "beyond the budget" if end is raises else "sparse")

    def test_memory_written_without_operators(self):
        """Writes through numpy: to small and large constants, before and after their first use, and to a buffer."""
        def before(model, h, k):
            a = torch.zeros(48)
            a.numpy()[:] = k
            return h * a

        def behind(model, h, k):
            a = torch.zeros(48)
            h = h + a
            a.numpy()[:] = k
            return h * a

        def twice(model, h, k):
            a = torch.zeros(48)
            memory = a.numpy()
            memory[:] = k
            h = h + a
            memory[:] = k + 1
            return h * a

        def written_then(model, h, k):
            a = torch.zeros(h.shape)
            if k > 2:
                a.numpy()[0, 0] = k
            a.add_(h.detach())
            return h * a * (a.numpy().sum().item() if k > 3 else 2.0)

        def large(model, h, k):
            a = torch.zeros(3, 600, 600)
            a[0, 0, 0] = 3
            if k > 2:
                a.add_(h.detach().mean())
            return h * (a.numpy()[0, 0, 0].item() if k == 4 else a.mean())

        def buffer(model, h, k):
            h = h * model.scale
            model.scale.numpy()[:] = k
            return h * model.scale

        def unused(model, h, k):
            torch.ones(3).numpy()[:] = k
            return h * model.scale

        for act in (before, behind, twice, written_then, large, buffer, unused):
            class Writes(Net):
                def begin(self):
                    self.steps = 0
                    self.register_buffer("scale", torch.ones(48))

                def act(self, h):
                    self.steps += 1
                    return act(self, h, self.steps).tanh()

            with self.subTest(act.__name__):
                self.check(Writes, steps=6, plans=act not in (before, behind, twice))

    def test_numbers_on_paths_by_turns(self):
        """A number changes in each step. Each path is recorded anew once, and then the number is an input of its plan."""
        class Turns(Net):
            def begin(self):
                self.steps = 0

            def act(self, h):
                self.steps += 1
                h = h * (1 + 0.1 * self.steps)
                return (h, h.sin(), h.tanh())[self.steps % 3]

        with self.assertLogs("remat", logging.INFO) as seen:
            self.check(Turns, steps=18)
        self.assertEqual(sum("recorded anew" in line for line in seen.output), 2)

    def test_threads(self):
        """Two models on two threads leave their paths at the same time."""
        class Turns(Net):
            def begin(self):
                self.steps = 0

            def act(self, h):
                self.steps += 1
                return h.relu() if self.steps % 2 else h.tanh()

            def forward(self, x):
                return self.last(self.act(self.first(x)))

        def made():
            torch.manual_seed(0)
            return Turns()

        def run(model, found):
            x = torch.linspace(-1, 1, 512).view(32, 16)
            for _ in range(12):
                model.zero_grad()
                model(x).square().mean().backward()
                found.append([p.grad.clone() for p in (*model.first.parameters(), *model.last.parameters())])

        models, found = [made(), *(remat.wrap(made(), cache=False) for _ in range(2))], [[], [], []]
        run(models[0], found[0])
        run_together([threading.Thread(target=run, args=of) for of in zip(models[1:], found[1:])])
        for other in found[1:]:
            self.assertEqual(len(other), 12)
            self.assertTrue(all(same(a, b) for a, b in zip(found[0], other)))


class Any(nn.Module):
    """A model that runs a list of parts. The test changes the list in each step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.register_buffer("sum", torch.zeros(16))
        self.old, self.program = None, []

    def forward(self, x):
        for part in self.program:
            x = PARTS[part](self, x)
        return x


def accumulate(m, x):
    with torch.no_grad():
        m.sum += x.mean(0)
    return x + m.sum


def keep(m, x):
    y = x if m.old is None else x + m.old
    m.old = y.detach()
    return y


def scatter(m, x):
    out = torch.zeros(16, x.shape[0])
    return x + out.index_add_(0, torch.arange(16), x.detach().t()).t()


def by_hand(m, x):
    a = torch.empty(16)
    a.numpy()[:] = 1 / len(m.program)
    return x * a


PARTS = {
    "linear": lambda m, x: m.layers[0](x).tanh(), "again": lambda m, x: m.layers[0](x).sin(), "second": lambda m, x: m.layers[1](x),
    "third": lambda m, x: m.layers[2](x).sigmoid(), "norm": lambda m, x: m.norm(x), "drop": lambda m, x: m.drop(x),
    "draw": lambda m, x: x * torch.rand(16), "view": lambda m, x: x.t().contiguous().t() * 2, "in place": lambda m, x: x.mul(1.5).tanh_(),
    "turned": lambda m, x: x.clone().transpose_(0, 1).t(), "sum": accumulate, "keep": keep, "scatter": scatter, "by hand": by_hand,
    "number": lambda m, x: x * (1 / len(m.program)), "tensor": lambda m, x: x + torch.tensor(1 / len(m.program)),
    "ask": lambda m, x: x * (1 + x.detach().mean().item()), "mask": lambda m, x: x * (x.detach() > 0),
    "seed": lambda m, x: (torch.manual_seed(len(m.program)), x * torch.rand(()))[1],
    "detached": lambda m, x: x + x.detach().cos(), "no gradient": lambda m, x: x + torch.no_grad()(m.layers[1])(x),
    "gradient": lambda m, x: x + torch.autograd.grad((y := x.detach().requires_grad_()).sin().sum(), y)[0],
}
#: Parts that prevent a plan.
UNPLANNED = {"ask"}


class RandomPaths(unittest.TestCase):
    def test_programs(self):
        """Random lists of parts. Each step replaces, inserts or drops a part, or returns to an earlier list."""
        logging.getLogger("remat").setLevel(logging.ERROR)
        self.addCleanup(logging.getLogger("remat").setLevel, logging.NOTSET)
        for seed in range(300 if os.environ.get("REMAT_FULL") == "1" else 25):
            choose, program = random.Random(seed), []
            known = sorted(PARTS.keys() - UNPLANNED) if seed % 3 else sorted(PARTS)
            programs = []
            for _ in range(8):
                kind = choose.random()
                if not program:
                    program = ["linear", *choose.choices(known, k=5), "second"]
                elif kind < 0.2:
                    program = choose.choice(programs)
                elif kind < 0.8:
                    at = choose.randrange(1, len(program))
                    program = program[:at] + choose.choices(known, k=choose.randrange(3)) + program[at + choose.randrange(2):]
                programs.append(program)

            def step(model, x, k):
                model.program = programs[k]
                model(x).tanh().square().mean().backward()

            with self.subTest(seed=seed, programs=programs):
                _, plain = trained(Any, step, len(programs), None)
                _, planned = trained(Any, step, len(programs), {})
                for k, (a, b) in enumerate(zip(plain, planned, strict=True)):
                    self.assertTrue(same(a, b), f"step {k}")


if __name__ == "__main__":
    unittest.main()
