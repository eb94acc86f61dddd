# SPDX-License-Identifier: Apache-2.0
"""Forwards that handle errors which depend on values are planned, and equal eager mode bit by bit."""

import contextlib
import logging
import unittest

import torch
import torch.nn.functional as F

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


class Handled(Test):
    """Errors that depend on values, and that the model handles."""

    def test_in_some_steps(self):
        guards = [within(manager) for manager in (Guard, guarded, guarded_inside)]
        for act in (factor, invert, look_up, lose, gather_in_a_function, ensure, *guards):
            for steps in ((), (2, 3, 6), (0, 1, 4), range(8)):
                class Fails(Net):
                    calls = 0

                    def act(self, h):
                        self.calls += 1
                        return self.drop(h) + act(h.tanh(), int(self.calls - 1 in steps)).mean() / 100

                with self.subTest(act.__name__, steps=steps), self.assertNoLogs("remat", logging.WARNING):
                    self.check(Fails, steps=8, budget="10 MiB")  # with room for calls that run ahead


if __name__ == "__main__":
    unittest.main()
