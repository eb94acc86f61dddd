# SPDX-License-Identifier: Apache-2.0
"""Compares training of wrapped and plain models bit by bit."""

import os
import tempfile

import emulated
import torch

import remat

torch.set_num_threads(1)
_cache = tempfile.TemporaryDirectory()  # plans and profiles start empty in each run
os.environ["XDG_CACHE_HOME"] = _cache.name


def same(a, b):
    """True if structures, types and all bits are equal."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and \
            torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(torch.isnan(a), torch.isnan(b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def copied(value):
    """A copy of a structure that later writes cannot change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(v) for v in value]
    return value


def total(value):
    """A loss that depends on all tensors of a structure."""
    if isinstance(value, torch.Tensor):
        return value.float().square().mean() if value.is_floating_point() else 0.0
    if isinstance(value, dict):
        return sum(total(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(total(v) for v in value)
    return 0.0


def trained(make, batches, wrap=None, loss=total, before=None, lr=0.05):
    """Trains a few steps. Returns results, losses, gradients, versions, parameters, buffers and the generator."""
    torch.manual_seed(0)
    model = make()
    model.train()
    if wrap is not None:
        wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    seen = []
    for i, batch in enumerate(batches):
        if before is not None:
            before(model, i)
        args, kwargs = batch if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], dict) else ((batch,), {})
        optimizer.zero_grad()
        result = model(*args, **kwargs)
        value = loss(result)
        value.backward()
        seen.append(copied([result, value, {n: p.grad for n, p in model.named_parameters()}]))
        optimizer.step()
    state = {k: v._version for k, v in model.named_buffers()}
    return model, [seen, copied(dict(model.state_dict())), state, emulated.random_state()]


def smallest(make, batches, **options):
    """The smallest known budget for the first of `batches`, in bytes."""
    try:
        trained(make, batches[:1], lambda m: remat.wrap(m, budget=1, time_limit=5, gap=0.9), **options)
    except remat.OverBudget as e:
        return e.needed
    raise AssertionError("one byte was enough")


def check(test, make, batches, *, budgets=("100% of activations", "tight"), time_limit=5, planned=True, **options):
    """Trains a plain and a wrapped model per budget and compares all visible state. Returns the wrapped model of the last budget."""
    _, expected = trained(make, batches, **options)
    for budget in budgets:
        with test.subTest(budget=budget):
            limit = smallest(make, batches, **options) if budget == "tight" else budget
            model, found = trained(make, batches, lambda m: remat.wrap(m, budget=limit, time_limit=time_limit, gap=0.9), **options)
            for what, a, b in zip(("steps", "state", "versions", "generator"), expected, found):
                test.assertTrue(same(a, b), f"{what} differ at {budget}")
            if planned:
                test.assertGreater(remat.of(model).plan["operations"], 0)
            if budget == "tight":
                test.assertLessEqual(remat.of(model).plan["peak"], limit)
    return model
