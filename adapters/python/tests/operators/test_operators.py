# SPDX-License-Identifier: Apache-2.0
"""Captures, replays and recomputes every operator with a derivative in PyTorch's own tests. Results equal eager mode bit by bit.

docs/operators.md lists the exceptions. The tests compare this table with their results. Run as a program, this file writes the table.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import sys
import warnings
from typing import Any, NamedTuple

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

import pytest
import torch
import torch.utils._pytree as pytree
from differential import assert_same, content, train
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db

import remat

common_utils.extract_test_fn = lambda: None  # the original reads the sources of all callers, for each operator

TABLE = pathlib.Path(__file__).parents[4] / "docs/operators.md"
FULL = os.environ.get("REMAT_FULL") == "1" or __name__ == "__main__"
SAMPLES = 2 if FULL else 1
#: Operators that run the same kernels as the code around them in `Between`, so their recomputation cannot be seen from names.
SAME = {"__radd__", "__rmul__", "add", "bfloat16", "cdouble", "cfloat", "chalf", "double", "einsum", "half", "inner", "kron", "masked.sum",
        "mul", "nan_to_num", "outer", "sum", "sum_to_size", "tensordot", "to"}


def differentiable(op):
    return op.supports_autograd and any(t.is_floating_point or t.is_complex for t in op.supported_backward_dtypes("cpu"))


def name_of(op):
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


OPERATORS = {name_of(op): op for op in op_db if differentiable(op)}


def dtype_of(op):
    """float32 if the operator supports it; otherwise its first supported type."""
    found = op.supported_backward_dtypes("cpu")
    return torch.float32 if torch.float32 in found else sorted(found, key=str)[0]


class Applied(torch.nn.Module):
    """A module that applies the operator alone to the tensors of a sample."""

    def __init__(self, op, sample):
        super().__init__()
        leaves, form = parts(sample)

        def result(tensors):
            given = iter(tensors)
            args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, torch.Tensor) else x for x in leaves], form)
            return op(*args, **kwargs)

        self.result = result

    def forward(self, *tensors):
        return self.result(tensors)


class Between(Applied):
    """A module that applies the operator several times, and then a larger operation on its results, whose backward runs first.

    If the operator returns views of an input, it gets a copy of the input, so that there is an output to recompute.
    """

    TIMES = 3
    AROUND = {"aten::mul", "aten::sum", "aten::_to_copy", "aten::add", "aten::nan_to_num"}  #: all other operators of the forward

    def __init__(self, op, sample):
        super().__init__(op, sample)
        given = tensors_of(sample)
        results = self.differentiable(given)
        memory = {t.untyped_storage()._cdata for t in results if t.layout is torch.strided}
        self.copied = [t.layout is torch.strided and t.untyped_storage()._cdata in memory for t in given]
        self.scale = torch.nn.Parameter(torch.tensor(1.5))  # its gradient needs the results, even if their own gradient is zero
        self.large = torch.nn.Parameter(torch.linspace(0, 1, 4 * self.TIMES * sum(t.numel() + 16 for t in given + results)))

    def differentiable(self, tensors):
        return [t for t in pytree.tree_leaves(self.result(tensors)) if isinstance(t, torch.Tensor) and t.requires_grad]

    def forward(self, *tensors):
        small = 0
        for i in range(0, len(tensors), len(self.copied)):
            for t in self.differentiable([t.clone() if copy else t for t, copy in zip(tensors[i:], self.copied)]):
                total = (t * self.scale).sum()
                small = small + (torch.view_as_real(total).sum() if t.is_complex() else total).double()
        return (self.large * small.nan_to_num(0, 0, 0)).sum()


followed = True  #: forwards are followed, not replayed


def parts(sample):
    return pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))


def tensors_of(sample):
    return [t for t in parts(sample)[0] if isinstance(t, torch.Tensor)]


def run(make, sample, times=1, **options):
    """Runs two steps of a module on new tensors. Returns (steps, gradients of inputs, plan; None without options)."""
    batches = [tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors_of(sample) * times) for _ in range(2)]
    model = make(sample)
    if options:
        remat.wrap(model, time_limit=1, gap=0.9, on_new_shape="plan", on_refuse="raise", follow=followed, **options)
    done = train(model, batches, optimizer=None)
    return done, [[content(t.grad) for t in b] for b in batches], remat.of(model).plan if options else None


class Tried(NamedTuple):
    """A sample, and its results in eager mode: of the operator alone, and of the operator several times."""

    sample: Any
    alone: tuple
    between: tuple


def tried(op, sample):
    """Runs a sample in eager mode. Returns None if two runs differ, or if there is no gradient."""
    try:
        alone = run(lambda s: Applied(op.op, s), sample)[:2]
        between, again = (run(lambda s: Between(op.op, s), sample, Between.TIMES)[:2] for _ in range(2))
    except Exception:
        return None
    with_gradient = any(g is not None for step in between[1] for g in step)
    return Tried(sample, alone, between) if between == again and with_gradient else None


def compare(plain, make, sample, times=1, **options):
    """Runs a module by a plan and compares it with the plain run. Returns the plan."""
    steps, gradients, plan = run(make, sample, times, **options)
    assert_same(plain[0], steps)
    assert plain[1] == gradients, "other gradients of inputs"
    return plan


def check(op, how, leanest):
    """Compares a run that keeps everything, a run with much recomputation, and maybe a run by the leanest plan, with eager mode.

    Returns whether the operator was recomputed.
    """

    def recomputed(again):
        return bool(again - Between.AROUND or (again and name_of(op) in SAME))

    def between(**options):
        return compare(how.between, lambda s: Between(op.op, s), how.sample, Between.TIMES, **options)

    compare(how.alone, lambda s: Applied(op.op, s), how.sample, budget="100%")
    try:  # just below the peak of store-all, by a method that then recomputes much of the forward
        again = between(budget="99.9%", solver="chen")["again"]
    except remat.OverBudget as e:
        again = between(budget=e.needed, solver="chen")["again"]
    if leanest or not recomputed(again):
        with pytest.raises(remat.OverBudget) as over:
            between(budget=1)
        again |= between(budget=over.value.needed)["again"]
    return recomputed(again)


SOME = "refused with some arguments: "
KEPT = "planned and replayed, but not recomputed within any budget"


def checked(op, how, leanest):
    """`check`, with follow=False for samples that read the state of the generator after a draw in order to restore it."""
    global followed
    try:
        return check(op, how, leanest)
    except remat.Refused as e:
        if "reads the state of the generator" not in str(e):
            raise
    followed = False
    try:
        return check(op, how, leanest)
    finally:
        followed = True


def outcome(op):
    """The text of the table for an operator; None if the operator is captured, replayed and recomputed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = itertools.islice(op.sample_inputs("cpu", dtype_of(op), requires_grad=True), 12)
        samples = list(itertools.islice(filter(None, (tried(op, s) for s in samples)), SAMPLES))
        if not samples:
            return "not tested: eager mode gives no two results that can be compared"
        refusals, kept = [], False
        for how in samples:
            first = how is samples[0]
            try:
                kept |= not checked(op, how, FULL and first) and first
            except remat.Refused as e:
                refusals.append(re.sub(r" \(call [^)]*\)", "", str(e)).replace("|", "/").replace("the forward cannot be recorded: ", ""))
    if refusals:
        return ("refused: " if len(refusals) == len(samples) else SOME) + refusals[0]
    return KEPT if kept else None


def listed():
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", TABLE.read_text(), re.M))


not_again = []  #: operators with an unexpected decision about recomputation; a few are allowed, because the planner decides by measured times


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name):
    found, expected = outcome(OPERATORS[name]), listed().get(name)
    if found != expected and {found, expected} == {None, KEPT}:
        not_again.append(name)
    elif FULL or expected is None or not expected.startswith(SOME):
        assert found == expected
    else:
        assert found in (None, expected.replace(SOME, "refused: "))


def test_nearly_all_were_recomputed():
    assert len(not_again) <= len(OPERATORS) // 50, not_again


def test_table_lists_operators_only():
    assert not listed().keys() - OPERATORS.keys()


HEAD = """# Operators

Every operator of PyTorch's own tests that has a derivative on the CPU is captured, replayed and recomputed: {all} of
them. The results equal those of eager mode bit by bit. The table lists the exceptions. None of them gives other
numbers: a refused operator runs as in plain PyTorch, or raises `remat.Refused` with `on_refuse="raise"` and the text
in the table.

Some operators have a replacement: `amax` and `amin` for `max` and `min` of a whole tensor, `torch.where` for boolean
masks.

`adapters/python/tests/operators/test_operators.py` checks this page. Run as a program, it writes the page.

| operator | what happens |
|---|---|
"""

if __name__ == "__main__":
    torch.set_num_threads(1)
    found, failed = {}, []
    for operator in sys.argv[1:] or OPERATORS:
        try:
            found[operator] = outcome(OPERATORS[operator])
        except Exception as problem:
            failed.append(operator)
            print(operator, type(problem).__name__, problem, file=sys.stderr)
    rows = "".join(f"| `{operator}` | {reason} |\n" for operator, reason in found.items() if reason)
    if failed or sys.argv[1:]:
        print(rows)
    else:
        TABLE.write_text(HEAD.format(all=len(OPERATORS)) + rows)
    sys.exit(bool(failed))
