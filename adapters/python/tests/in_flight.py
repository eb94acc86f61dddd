# SPDX-License-Identifier: Apache-2.0
"""Several calls of a wrapped module before a backward. They share memory, and equal eager mode bit by bit."""

import copy
import logging
import threading
import unittest

import torch
from following import Net, Test, run_together, same, trained
from torch import nn

import remat

torch.set_num_threads(1)


class Cell(nn.Module):
    def __init__(self, width=128, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def meter():
    """A second session that measures the memory of the process during the tests."""
    counting = remat.wrap(nn.Linear(2, 2), cache=False)
    counting(torch.ones(1, 2)).sum().backward()
    return counting, remat.of(counting)


def unrolled(model, x, calls):
    for _ in range(calls):
        x = model(x)
    x.square().mean().backward()


def peaks(make, calls, steps, wrap=None):
    """Trains a model. Returns (model, peak of each step beyond the bytes before it)."""
    counting, counted = meter()
    torch.manual_seed(0)
    model = make()
    if wrap is not None:
        remat.wrap(model, time_limit=1, gap=0.9, cache=False, **wrap)
    found = []
    x = torch.randn(64, 128)
    for _ in range(steps):
        model.zero_grad()
        if wrap is not None:
            remat.of(model).release()
        counted.reset_peak()
        before = counted.memory()["peak"]
        unrolled(model, x, calls)
        found.append(counted.memory()["peak"] - before)
    return model, found


class InFlight(Test):
    def planned(self, make, step, steps=5, **options):
        """Like `check`, and fails on a warning: no step may run unplanned."""
        with self.assertNoLogs("remat", logging.WARNING):
            return self.check(make, step, steps, **options)

    def test_calls_in_a_chain(self):
        for calls in (2, 3, 12):
            with self.subTest(calls=calls):
                model = self.planned(Net, lambda m, x, k: unrolled(m, x, calls))
                self.assertRegex(str(remat.of(model).report()), rf"steps in flight +{calls}\b")

    def test_numbers_of_calls_that_change(self):
        self.planned(Net, lambda m, x, k: unrolled(m, x, [3, 1, 1, 5, 2, 4, 4][k]), steps=7)

    def test_sizes_that_differ_among_the_calls(self):
        def step(model, x, k):
            y = model(x)
            z = model(torch.cat([y[: 8 + k], x]))
            (model(y).sum() + model(z).square().sum()).backward()

        self.planned(Net, step)

    def test_orders_of_backwards(self):
        def each(model, x, k):
            a, b, c = model(x), model(2 * x), model(3 * x)
            for y in ((a, b, c), (c, b, a), (b, c, a))[k % 3]:
                y.square().mean().backward()

        def some(model, x, k):
            a, b, c = model(x), model(2 * x), model(3 * x)
            del a
            (b * c).mean().backward()

        def one(model, x, k):
            a, b = model(x), model(2 * x)
            (b if k % 2 else a).square().mean().backward()

        def among(model, x, k):
            a = model(x)
            model(2 * x).square().mean().backward()
            b = model(a)
            b.square().mean().backward()

        for step in (each, some, one, among):
            with self.subTest(step=step.__name__):
                self.planned(Net, step, steps=7)

    def test_inputs_made_of_the_same_parameters(self):
        """The graph of an input is not part of the step, even if it leads to the same parameters."""
        def before(model, x):
            return x @ model.last.weight @ model.first.weight

        def tied(model, x, k):
            model(before(model, x)).square().mean().backward()

        def of_itself(model, x, k):
            unrolled(model, model(x) + before(model, x), 2)

        def input_returned(model, x, k):
            y = before(model, x)
            (model(y) * y).mean().backward()

        def two_parts(model, x, k):
            y, z = torch.cat([before(model, x), x]).chunk(2)
            (model(y) - model(z).tanh()).square().mean().backward()

        for step in (tied, of_itself, input_returned, two_parts):
            with self.subTest(step=step.__name__):
                self.planned(Net, step)

    def test_other_backwards_of_such_inputs(self):
        def graph(model, x, k):
            x.requires_grad_()
            y = model(model(x @ model.last.weight @ model.first.weight))
            (g,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
            (y.mean() + g.square().sum()).backward()

        def twice(model, x, k):
            y = model(model(x))
            y.mean().backward(retain_graph=True)
            y.square().mean().backward()

        def other_use(model, x, k):
            y = model(model(x))
            (y[:, :4].sum() if k == 2 else y.square().mean()).backward()

        for step in (graph, twice, other_use):
            with self.subTest(step=step.__name__):
                self.check(Net, step)

    def test_buffers_that_each_call_writes(self):
        """The backward of a call does not read the buffers again, because another call may have written them."""
        class Averages(Net):
            def begin(self):
                self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
                self.register_buffer("means", torch.zeros(6, 48))

            def act(self, h):
                for layer, mean in zip(self.layers, self.means):
                    h = layer(h).tanh()
                    with torch.no_grad():
                        mean.lerp_(h.mean(0), 0.1)
                    h = (h - mean).sin()
                return h

        self.check(Averages, lambda model, x, k: (model(x) - model(x * 2)).square().mean().backward(), budget="100% of activations")

    def test_statistics_draws_and_exceptions(self):
        class Fails(Net):
            def begin(self):
                self.calls = 0

            def act(self, h):
                self.calls += 1
                if self.calls % 5 == 0:
                    raise ArithmeticError
                return h.tanh()

        def step(model, x, k):
            kept = []
            for _ in range(4):
                try:
                    kept.append(model(x))
                except ArithmeticError:
                    kept.append(x)
                x = kept[-1] + torch.rand_like(x)
            sum(kept).square().mean().backward()

        self.planned(Fails, step, steps=6)

    def test_memory_of_eager_mode(self):
        """Twenty calls need at most the memory of 21 plain calls, plus the gradients of one call beside their sum."""
        _, plain = peaks(Cell, 20, 3)
        model, (_, *planned) = peaks(Cell, 20, 4, {"budget": "100% of activations"})
        self.assertLessEqual(max(planned), 21 / 20 * max(plain) + sum(p.nbytes for p in model.parameters()))

    def test_budgets_in_bytes(self):
        """The first step learns the number of calls. Later steps stay within the budget."""
        _, (plain, *_) = peaks(Cell, 20, 2)
        parameters = sum(p.nbytes for p in Cell().parameters())
        least = parameters + 20 * 64 * 128 * 4  # gradients, and the outputs of all calls
        for part in (0.3, 0.6):
            step = int(least + part * (plain - least))
            with self.subTest(part=part), self.assertLogs("remat", logging.WARNING) as told:
                model, (_, *later) = peaks(Cell, 20, 4, {"budget": parameters + 64 * 128 * 4 + step})
                logging.getLogger("remat").warning("end")
            self.assertLessEqual(max(later), step)
            self.assertIn("others wait for their backward", told.output[0])
            self.assertEqual(len(told.output), 2)
            self.assertGreater(len(remat.of(model).plan["again"]), 0)

    def test_one_large_call_among_small_ones(self):
        """One large call beside six small calls fits the budget; seven large calls would not."""
        torch.manual_seed(0)
        model = Cell()
        parameters = sum(p.nbytes for p in model.parameters())
        remat.wrap(model, budget=3 * parameters + 12 * 2**20, time_limit=1, gap=0.9, cache=False)
        small, large = torch.randn(4, 128), torch.randn(512, 128)
        for _ in range(4):
            model.zero_grad()
            with self.assertNoLogs("remat", logging.WARNING):
                (sum(model(small * k).sum() for k in range(6)) + model(large).sum()).backward()

    def test_memory_of_larger_calls_makes_room(self):
        """Smaller calls reuse the memory of earlier larger calls. If no plan fits beside this memory, it is freed."""
        torch.manual_seed(0)
        model = Cell()
        parameters = sum(p.nbytes for p in model.parameters())
        remat.wrap(model, budget=3 * parameters + 10 * 2**20, time_limit=1, gap=0.9, cache=False)
        for x in (torch.randn(256, 128), torch.randn(512, 128)) * 3:
            model.zero_grad()
            with self.assertNoLogs("remat", logging.WARNING):
                (model(x) + model(2 * x)).sum().backward()
            self.assertEqual(remat.of(model).plan["recomputed"] > 0, len(x) == 512)

    def test_too_many_calls_for_a_budget(self):
        torch.manual_seed(0)
        model = Cell()
        state = copy.deepcopy(model.state_dict())
        parameters = sum(p.nbytes for p in model.parameters())
        x = torch.randn(64, 128)
        remat.wrap(model, budget=2 * parameters + 5 * 2**20, time_limit=1, gap=0.9, cache=False)
        with self.assertLogs("remat", logging.WARNING):
            unrolled(model, x, 200)
        with self.assertRaisesRegex(remat.OverBudget, "no plan is known for 200 calls in flight"):
            unrolled(model, x, 200)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values())))
        remat.of(model).set_budget(2**30)
        unrolled(model, x, 200)

    def test_forwards_without_a_backward(self):
        """The memory of such calls is freed with their outputs, also if outputs depend on each other. Remaining outputs stay usable."""
        class Several(Cell):
            def forward(self, x):
                hidden = [x := x + layer(x) for layer in self.layers]
                return x, hidden

        def took(model, counted, before):
            x = torch.randn(64, 128)
            for k in range(9):
                before(model(x), k)
                yield counted.memory()["peak"]

        counting, counted = meter()
        for before in (lambda outputs, k: None, lambda outputs, k: k % 3 == 0 and outputs[0].sum().backward()):
            model = remat.wrap(Several(), time_limit=1, gap=0.9, cache=False)
            for _ in range(2):
                counted.reset_peak()
                found = list(took(model, counted, before))
            self.assertEqual(len(set(found[3:])), 1)

        torch.manual_seed(0)
        plain = Several()
        model = remat.wrap(copy.deepcopy(plain), time_limit=1, gap=0.9, cache=False)
        x = torch.randn(64, 128)
        for take in (lambda o: o[0], lambda o: o[1][0], lambda o: o[1][1][3:] * 2, lambda o: o[1][2].grad_fn):
            for m in (plain, model):
                m.zero_grad()
                left = take(m(x))
                for _ in range(3):
                    m(x)
                if isinstance(left, torch.Tensor):
                    left.square().mean().backward()
            self.assertTrue(same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()]))

    def test_threads(self):
        """Several threads, each with its own calls in flight."""
        def run(wrapped):
            torch.manual_seed(0)
            model = Cell(16)
            if wrapped:
                remat.wrap(model, budget="100% of activations", time_limit=1, gap=0.9, cache=False)
            x = torch.randn(4, 8, 16)
            found, failed = [None] * 4, []

            def train(k):
                try:
                    for _ in range(10):
                        y = x[k]
                        for _ in range(1 + k):
                            y = model(y)
                        found[k] = torch.autograd.grad(y.square().sum(), list(model.parameters()))
                except Exception as e:
                    failed.append(e)

            run_together([threading.Thread(target=train, args=(k,)) for k in range(4)])
            self.assertEqual(failed, [])
            return found

        for a, b in zip(run(False), run(True)):
            self.assertTrue(same(a, b))


if __name__ == "__main__":
    unittest.main()
