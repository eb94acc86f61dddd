# SPDX-License-Identifier: Apache-2.0
"""Every operator that PyTorch tests and that has a derivative: captured, replayed and recomputed, bit by bit as eager mode.

docs/operators.md lists those that are not, and is compared with what is seen here. Run as a program, this writes it.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import sys
import warnings

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

import pytest
import torch
import torch.utils._pytree as pytree
from differential import assert_same, content, train
from torch.testing._internal.common_methods_invocations import op_db

import remat

TABLE = pathlib.Path(__file__).parents[4] / "docs/operators.md"
SAMPLES = 2


def differentiable(op):
    return op.supports_autograd and any(t.is_floating_point or t.is_complex for t in op.supported_backward_dtypes("cpu"))


def name_of(op):
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


OPERATORS = {name_of(op): op for op in op_db if differentiable(op)}


def dtype_of(op):
    """float32 where the operator takes it."""
    found = op.supported_backward_dtypes("cpu")
    return torch.float32 if torch.float32 in found else sorted(found, key=str)[0]


class Applied(torch.nn.Module):
    """The operator alone."""

    def __init__(self, op, form):
        super().__init__()
        self.op, self.form = op, form

    def result(self, tensors):
        args, kwargs = pytree.tree_unflatten(list(tensors), self.form)
        return self.op(*args, **kwargs)

    def forward(self, *tensors):
        return self.result(tensors)


class Between(Applied):
    """The operator, whose results the backward reads, before something larger.

    copies: the operator takes copies of its tensors, so that views have something to be recomputed. large: elements that push the
    values of the operator out of a small budget.
    """

    def __init__(self, op, form, copies, large):
        super().__init__(op, form)
        self.copies, self.large = copies, torch.nn.Parameter(torch.linspace(0, 1, large))

    def forward(self, *tensors):
        if self.copies:
            tensors = [t * 1 if isinstance(t, torch.Tensor) and t.requires_grad else t for t in tensors]
        leaves = [t for t in pytree.tree_leaves(self.result(tensors)) if isinstance(t, torch.Tensor) and t.requires_grad]
        small = sum(t.sin().abs().double().sum() for t in leaves)
        return small + self.large.exp().sum().double()


def plain_batches(sample, steps):
    """The sample, as often as there are steps; tensors are new ones each time."""
    leaves, form = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))

    def fresh(t):
        return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t

    return form, [tuple(map(fresh, leaves)) for _ in range(steps)]


def run(make, sample, budget, steps=2):
    """Steps of a module around the operator, and gradients of its tensors."""
    form, batches = plain_batches(sample, steps)
    model = make(form)
    if budget is not None:
        remat.wrap(model, budget=budget, time_limit=1, on_new_shape="plan")
    done = train(model, batches, optimizer=None)
    gradients = [[content(t.grad) for t in b if isinstance(t, torch.Tensor)] for b in batches]
    return done, gradients, remat.of(model).plan if budget is not None else None


def compare(make, sample, budgets):
    """Runs it plain and within budgets; returns the last plan."""
    plain, gradients, plan = run(make, sample, None)
    for budget in budgets:
        if budget == "smallest":
            with pytest.raises(remat.OverBudget) as over:
                run(make, sample, 1)
            budget = over.value.needed
        steps, planned_gradients, plan = run(make, sample, budget)
        assert_same(plain, steps)
        assert gradients == planned_gradients, "other gradients of inputs"
    return plan


def between(op, copies=False, large=64):
    return lambda form: Between(op.op, form, copies, large)


def check(op):
    """Runs the operator; returns whether it was recomputed."""
    recomputed = False
    samples = list(itertools.islice(op.sample_inputs("cpu", dtype_of(op), requires_grad=True), 12))
    samples = [s for s in samples if usable(op, s)][:SAMPLES]
    if not samples:
        raise NotComparable
    for sample in samples:
        compare(lambda form: Applied(op.op, form), sample, ["100%"])
        large = 64 + sum(t.numel() for t in pytree.tree_leaves((sample.input, sample.args)) if isinstance(t, torch.Tensor))
        for copies, factor in ((False, 8), (True, 8), (True, 64)):
            if compare(between(op, copies, factor * large), sample, ["smallest"])["recomputed"]:
                recomputed = True
                break
    return recomputed


class NotComparable(Exception):
    """Eager mode draws from elsewhere, or gives no dense gradient."""


def usable(op, sample):
    """Does eager mode itself give the same twice, with a gradient?"""
    try:
        one, two = (run(between(op), sample, None) for _ in range(2))
        return one[:2] == two[:2] and any(g is not None for step in one[1] for g in step)
    except Exception:
        return False


def outcome(op):
    """None if all is well, else why the operator is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            recomputed = check(op)
        except NotComparable:
            return "eager mode gives no two results that can be compared"
        except (remat.OverBudget, remat.NotEqual):
            raise
        except remat.Error as e:
            return re.sub(r" \(call [^)]*\)", "", str(e)).replace("|", "/")
    return None if recomputed else "is never worth to recompute"


def listed():
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", TABLE.read_text(), re.M)) if TABLE.exists() else {}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name):
    assert outcome(OPERATORS[name]) == listed().get(name)


def test_table_lists_operators_only():
    assert not listed().keys() - OPERATORS.keys()


HEAD = """# Operators

Every operator of PyTorch's own tests that has a derivative on the CPU, {all} of them, is captured, replayed and recomputed bit by
bit as eager mode computes it, with the exceptions below. `adapters/python/tests/operators` checks that, and that this table is
exact; it also wrote it: `python adapters/python/tests/operators/test_operators.py`.

| operator | what happens |
|---|---|
"""

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for operator in sys.argv[1:] or OPERATORS:
        try:
            found[operator] = outcome(OPERATORS[operator])
        except BaseException as problem:
            found[operator] = None
            print(operator, type(problem).__name__, problem, file=sys.stderr)
    rows = "".join(f"| `{operator}` | {reason} |\n" for operator, reason in found.items() if reason)
    if sys.argv[1:]:
        print(rows)
    else:
        TABLE.write_text(HEAD.format(all=len(OPERATORS)) + rows)
