# SPDX-License-Identifier: Apache-2.0
"""Calls and modules that cannot be planned."""

from __future__ import annotations

import contextlib
from typing import Iterator

import torch

from ._errors import Refused


def refuse_unplanned(inputs: list[torch.Tensor]) -> None:
    """Raises Refused if these inputs, or the current modes of PyTorch, exclude a plan."""
    for t in inputs:
        if t.layout is not torch.strided or t.is_quantized or t.is_nested:
            raise Refused("an argument is a tensor that is sparse, nested or quantized")
        if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise Refused(f"an argument is a {type(t).__module__}.{type(t).__qualname__}, which is no plain tensor")
    if torch.is_anomaly_enabled():
        raise Refused("anomaly detection is on")
    if torch.autograd.forward_ad._current_level >= 0:
        raise Refused("forward-mode AD is on")
    with without_save_on_cpu():
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            raise Refused("hooks around the call take the tensors that the backward needs (a checkpoint)",
                          advice="leave them out around a wrapped module: the planner decides what is kept")
    if torch._C._len_torch_dispatch_stack() > 0:
        raise Refused("a dispatch mode is active")
    refuse_transforms()


@contextlib.contextmanager
def without_save_on_cpu() -> Iterator[None]:
    """A context in which a `save_on_cpu` around it has no effect: the plan decides what a step keeps, and where."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    around = hooks is not None and getattr(hooks[0], "__code__", None) in torch.autograd.graph.save_on_cpu.__init__.__code__.co_consts
    if around:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        if around:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def refuse_transforms() -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Refused("a wrapped model cannot be planned inside a transform of torch.func",
                      advice="call it within remat.of(model).paused()")


def refuse_parts(model: torch.nn.Module) -> None:
    """Raises Refused if the model has a module that no plan can hold: compiled, sharded or DistributedDataParallel."""
    for name, module in model.named_modules():
        if module is not model and (type(module).__module__.startswith("torch._dynamo") or module._compiled_call_impl is not None):
            raise Refused(f"module {name} inside is compiled: a plan is made of the operators of eager mode",
                          advice="wrap parts that hold no compiled modules, or leave out torch.compile")
        for c in type(module).__mro__:
            if c.__name__ in ("FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel") and c.__module__.startswith("torch."):
                raise Refused(f"module {name or type(module).__name__} is a {c.__name__}: its parameters come and go, or gradients are averaged, within a step",
                              advice="DistributedDataParallel(remat.wrap(module)); sharded parameters are not planned yet")
