# SPDX-License-Identifier: Apache-2.0
"""Records training steps, so that two of them can be compared bit by bit."""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple

import emulated
import torch
import torch.utils._pytree as pytree

import remat

ANY_PLAN = remat.Planner(time_limit=1, gap=0.9)  #: the first plan that fits the budget, for tests that need no fast plan
SEARCHED = remat.Planner(time_limit=0.3)  #: a plan that a short search has made less regular


def content(value: Any) -> Any:
    """A comparable form of a value. It must be equal in two runs. For a tensor: geometry and bytes; for anything else: the value itself.

    The stride of a dimension with one element has no meaning and is ignored.
    """
    if not isinstance(value, torch.Tensor):
        if type(value).__eq__ is object.__eq__ and hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
            return (type(value).__qualname__, written(vars(value)))  # such as a cache of keys and values
        return value
    t = value.detach()
    if t.layout is not torch.strided:
        return (str(t.layout), t.shape, content(t.to_dense()))
    if t._is_zerotensor():
        t = torch.zeros(t.shape, dtype=t.dtype)
    data = t.resolve_conj().resolve_neg().contiguous().reshape(-1)
    strides = tuple(stride for size, stride in zip(t.shape, t.stride()) if size != 1)
    return (t.dtype, tuple(t.shape), strides, data.view(torch.uint8).cpu().numpy().tobytes() if data.numel() else b"")


def written(value: Any) -> tuple:
    """`content` of all values in a structure, and the form of the structure."""
    leaves, form = pytree.tree_flatten(value)
    return str(form), [content(leaf) for leaf in leaves]


class Step(NamedTuple):
    """The results of a training step."""

    outputs: Any
    gradients: dict[str, Any]
    state: dict[str, Any]
    inputs: Any
    generator: bytes


def loss_of(outputs: Any) -> torch.Tensor:
    """The output "loss" if there is one; otherwise a sum over all outputs that require a gradient."""
    if isinstance(outputs, dict) and outputs.get("loss") is not None:
        return outputs["loss"]
    leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if len(leaves) == 1 and leaves[0].dim() == 0 and not leaves[0].is_complex():
        return leaves[0]
    return sum((t.abs().square() if t.is_complex() else t.square()).sum() for t in leaves)


def train(model: torch.nn.Module, batches: Iterable[dict[str, Any] | tuple], *, loss: Callable = loss_of, seed: int = 7,
          optimizer: Callable | None = lambda p: torch.optim.AdamW(p, lr=1e-3), before: Callable = lambda: None,
          after: Callable = lambda: None) -> list[Step]:
    """Trains a model, a step per batch.

    batches: keyword or positional arguments of each call. loss: function of the outputs of the model. before, after: called before the
    forward and after the backward of each step.
    """
    emulated.seed(seed)
    update = optimizer([p for p in model.parameters() if p.requires_grad]) if optimizer else None
    steps = []
    for batch in batches:
        model.zero_grad()
        before()
        outputs = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss(outputs).backward()
        after()
        steps.append(Step(written(outputs), {n: content(p.grad) for n, p in model.named_parameters()}, {}, written(batch),
                          emulated.random_state().numpy().tobytes()))
        if update:
            update.step()
        steps[-1].state.update({n: content(t) for n, t in [*model.named_parameters(), *model.named_buffers()]})
    return steps


def assert_same(plain: list[Step], planned: list[Step]) -> None:
    """Fails if planned steps differ from plain steps in any bit. The message names the first difference."""
    assert len(plain) == len(planned)
    for i, (a, b) in enumerate(zip(plain, planned)):
        assert a.outputs == b.outputs, f"step {i}: other outputs"
        assert a.inputs == b.inputs, f"step {i}: other inputs"
        for what in ("gradients", "state"):
            x, y = getattr(a, what), getattr(b, what)
            assert x.keys() == y.keys()
            other = [name for name in x if x[name] != y[name]]
            assert not other, f"step {i}: other {what}: {', '.join(other)}"
        assert a.generator == b.generator, f"step {i}: the generator is in another state"
