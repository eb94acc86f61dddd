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
from typing import Any, NamedTuple

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

import pytest
import torch
import torch.utils._pytree as pytree
from differential import assert_same, content, train
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db

import remat

common_utils.extract_test_fn = lambda: None  # which reads the sources of all callers, for each operator

TABLE = pathlib.Path(__file__).parents[4] / "docs/operators.md"
FULL = os.environ.get("REMAT_FULL") == "1" or __name__ == "__main__"
SAMPLES = 2 if FULL else 1
#: Made of the same kernels as what is around them in `Between`, so that a recomputation cannot be told from that.
SAME = {"__radd__", "__rmul__", "add", "bfloat16", "cdouble", "cfloat", "chalf", "double", "einsum", "half", "inner", "kron", "masked.sum",
        "mul", "nan_to_num", "outer", "sum", "sum_to_size", "tensordot", "to"}


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
    """The operator alone, as a function of the tensors of a sample."""

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
    """The operator, several times, before something larger that depends on its results and whose backward comes first.

    Copies are taken of what it gives views of, so that there is something to be recomputed.
    """

    TIMES = 3
    AROUND = {"aten::mul", "aten::sum", "aten::_to_copy", "aten::add", "aten::nan_to_num"}  #: what else the forward runs

    def __init__(self, op, sample):
        super().__init__(op, sample)
        given = tensors_of(sample)
        results = self.differentiable(given)
        memory = {t.untyped_storage()._cdata for t in results if t.layout is torch.strided}
        self.copied = [t.layout is torch.strided and t.untyped_storage()._cdata in memory for t in given]
        self.scale = torch.nn.Parameter(torch.tensor(1.5))  # its gradient needs the results, also if theirs is zero
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
    """Two steps of a module around the operator, each on new tensors; their gradients, and the plan if there are options."""
    batches = [tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors_of(sample) * times) for _ in range(2)]
    model = make(sample)
    if options:
        remat.wrap(model, time_limit=1, gap=0.9, on_new_shape="plan", on_refuse="raise", follow=followed, **options)
    done = train(model, batches, optimizer=None)
    return done, [[content(t.grad) for t in b] for b in batches], remat.of(model).plan if options else None


class Tried(NamedTuple):
    """A sample, and what eager mode gives for it: the operator alone, and several times."""

    sample: Any
    alone: tuple
    between: tuple


def tried(op, sample):
    """None if eager mode itself does not give the same twice, with a gradient."""
    try:
        alone = run(lambda s: Applied(op.op, s), sample)[:2]
        between, again = (run(lambda s: Between(op.op, s), sample, Between.TIMES)[:2] for _ in range(2))
    except Exception:
        return None
    with_gradient = any(g is not None for step in between[1] for g in step)
    return Tried(sample, alone, between) if between == again and with_gradient else None


def compare(plain, make, sample, times=1, **options):
    """Runs it by a plan, which it returns, and compares that with the plain run."""
    steps, gradients, plan = run(make, sample, times, **options)
    assert_same(plain[0], steps)
    assert plain[1] == gradients, "other gradients of inputs"
    return plan


def check(op, how, leanest):
    """Compares a run in which everything is kept, one in which much runs again, and maybe one by the leanest plan.

    Returns whether the operator was recomputed.
    """

    def recomputed(again):
        return bool(again - Between.AROUND or (again and name_of(op) in SAME))

    def between(**options):
        return compare(how.between, lambda s: Between(op.op, s), how.sample, Between.TIMES, **options)

    compare(how.alone, lambda s: Applied(op.op, s), how.sample, budget="100%")
    try:  # just below what everything takes, by a method that then runs much of the forward again
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
    """`check`. Some samples read the state of the generator after a draw, to put it back: these forwards are replayed."""
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
    """None if all is well, else what is not."""
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


not_again = []  #: what should have been recomputed; the planner decides by measured times, so a few may be


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
