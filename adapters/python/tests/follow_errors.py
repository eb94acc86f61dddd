# SPDX-License-Identifier: Apache-2.0
"""Forwards that handle errors which depend on values are planned, and equal eager mode bit by bit."""

import contextlib
import logging
import unittest

import torch
import torch.nn.functional as F

import remat
from following import Net, Test


def factor(h, bad):
    """Adds to the diagonal until the matrix is positive definite."""
    square = h[:, :8].T @ h[:, :8] / 32 + (0.1 - 100 * bad) * torch.eye(8)
    for more in (0, 1, 200):
        try:
            return torch.linalg.cholesky(square + more * torch.eye(8))
        except torch.linalg.LinAlgError:
            pass


def invert(h, bad):
    try:
        return torch.linalg.inv((h[:8, :8] + torch.eye(8)) * (1 - bad))
    except RuntimeError:
        return h.sin()


def look_up(h, bad):
    try:
        return F.embedding((h.detach() > 0).long() + 100 * bad, h[:2])
    except IndexError:
        return h.cos()


def lose(h, bad):
    found = h.mean()
    with contextlib.suppress(IndexError):
        found = F.cross_entropy(h, h.detach().argmax(1) + 100 * bad)
    return found


class Guard:
    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return kind is not None and issubclass(kind, IndexError)


@contextlib.contextmanager
def guarded():
    try:
        yield
    except IndexError:
        pass


@contextlib.contextmanager
def guarded_inside():
    with contextlib.suppress(IndexError):
        yield


def within(manager):
    """A lookup inside `with manager()`, and inside a `with` of the object itself."""
    def look_up(h, bad):
        found, own = h.mean(), manager()
        with manager(), torch.enable_grad():
            found = found + F.embedding((h.detach() > 0).long() + 100 * bad, h[:2]).mean()
        with own:
            found = found + F.embedding((h.detach() > 0).long() + 100 * bad, h[:2]).mean()
        return found

    return look_up


def gather_in_a_function(h, bad):
    def chosen():
        return h.gather(1, h.detach().argsort(1) + 100 * bad)

    try:
        return chosen()
    except Exception:
        return 2 * h


def ensure(h, bad):
    try:
        torch._assert_async((h.detach() < 100 - 200 * bad).all())
    except RuntimeError:
        return h / 2
    return h


class Edges(torch.nn.Module):
    """Sums differences over the edges of a graph, and reports nodes that are not there, as layers for graphs do."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.last = (torch.nn.Linear(n, 16) for n in (8, 8, 8, 16))

    def rows(self, t, nodes):
        try:
            return t.index_select(0, nodes)
        except IndexError:
            raise ValueError("no such node")

    def forward(self, x, edges):
        a, b = self.a(x), self.b(x)
        sources = self.rows(a, edges[0])
        targets = self.rows(b, edges[1])
        sums = torch.zeros_like(a).index_add(0, edges[1], sources - targets)
        return self.last((sums + self.c(x)).relu()).square().mean()


@torch.library.custom_op("remat_tests::choose_rows", mutates_args=())
def choose_rows(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return t.index_select(0, rows)


choose_rows.register_fake(lambda t, rows: t.new_empty(len(rows), t.shape[1]))
choose_rows.register_autograd(lambda ctx, g: (g.new_zeros(ctx.size).index_add(0, *ctx.saved_tensors, g), None),
                              setup_context=lambda ctx, inputs, output: (setattr(ctx, "size", inputs[0].shape), ctx.save_for_backward(inputs[1])))


def kernels(h, bad):
    """Operators with one or several lists of indices, which the step makes."""
    rows, columns = h.detach().argsort(0)[:4, 0], h.detach().argmax(1)[:4] + 100 * bad
    found = h.sin()
    for choose in (lambda: h[rows, columns], lambda: h[:, columns], lambda: h.take(rows * 48 + columns + bad * 10000),
                   lambda: h.index_select(1, columns.int()), lambda: h.gather(-1, columns[:, None]), lambda: h[rows - 8, columns]):
        try:
            found = found + choose().mean()
        except (IndexError, RuntimeError):
            found = found.cos()
    return found


class Handled(Test):
    """Errors that depend on values, and that the model handles."""

    def test_in_some_steps(self):
        guards = [within(manager) for manager in (Guard, guarded, guarded_inside)]
        for act in (factor, invert, look_up, lose, gather_in_a_function, ensure, kernels, *guards):
            for steps in ((), (2, 3, 6), (0, 1, 4), range(8)):
                class Fails(Net):
                    calls = 0

                    def act(self, h):
                        self.calls += 1
                        return self.drop(h) + act(h.tanh(), int(self.calls - 1 in steps)).mean() / 100

                with self.subTest(act.__name__, steps=steps), self.assertNoLogs("remat", logging.WARNING):
                    self.check(Fails, steps=8, budget="10 MiB")  # with room for calls that run ahead

    def with_little_memory(self, make):
        """Returns the session of a model with the smallest budget known to do, and a function that runs a step."""
        def run(bad=0):
            x, edges = torch.randn(2000, 8), torch.randint(0, 2000, (2, 6000)) + bad
            session.reset_peak()
            model.zero_grad()
            model(x, edges).backward()

        torch.manual_seed(0)
        model = remat.wrap(make(), budget=1, time_limit=1, cache=False)
        session = remat.of(model)
        with self.assertRaises(remat.OverBudget) as seen:
            run()
        session.set_budget(seen.exception.needed)
        return session, run

    def test_indices_in_range(self):
        """A look-up by indices that are known to be in range does not run ahead of the plan: steps stay within the budget."""
        session, run = self.with_little_memory(Edges)
        with self.assertNoLogs("remat", logging.WARNING):
            for k in range(4):
                run()
                held = session.memory()
                if k:
                    self.assertLessEqual(held["peak"], held["budget"], f"step {k}")
        with self.assertRaisesRegex(ValueError, "no such node"):
            run(bad=2000)

    def test_results_of_kernels_that_run_ahead(self):
        """A warning counts the results of a kernel that runs ahead of the plan."""
        class Custom(Edges):
            def rows(self, t, nodes):
                try:
                    return choose_rows(t, nodes)
                except IndexError:
                    raise ValueError("no such node")

        session, run = self.with_little_memory(Custom)
        with self.assertLogs("remat", logging.WARNING) as told:
            for _ in range(2):
                run()
        self.assertIn("beyond the budget when they run ahead of the plan", told.output[0])
        self.assertEqual(len(told.output), 1)


if __name__ == "__main__":
    unittest.main()
