# SPDX-License-Identifier: Apache-2.0
"""Memory of the states of an optimizer."""

from __future__ import annotations

import collections
from typing import Any

import torch


def state_bytes(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> int:
    """Bytes of the states for parameters of `model`. Includes states that the first step will make; excludes states on a disk.

    Raises ValueError if a trial step on tensors without data fails.
    """
    from ._optimizer import _Offloaded

    cls = type(optimizer)
    if isinstance(optimizer, _Offloaded):
        if optimizer._disk is not None:
            return 0
        cls = cls._plain  # type: ignore[attr-defined]
    ours = set(model.parameters())
    found = 0
    for group in optimizer.param_groups:
        fresh = []
        for p in group["params"]:
            if p not in ours or not p.requires_grad:
                continue
            if state := optimizer.state.get(p):
                found += _bytes(state)
            else:
                fresh.append(_without_data(p))
        if fresh:
            one_by_one: dict[str, Any] = {name: False for name in ("foreach", "fused", "capturable") if name in group}
            found += _first_states(optimizer, cls, {**group, **one_by_one, "params": fresh})
    return found


def _first_states(optimizer: torch.optim.Optimizer, cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> int:
    trial = cls.__new__(cls)  # its constructor may want arguments that only the user knows
    vars(trial).update(vars(optimizer), param_groups=[group], state=collections.defaultdict(dict))
    try:
        trial.step()
    except Exception as e:  # some steps read values and fail, but have made all states by then
        if not all(trial.state.get(p) for p in group["params"]):
            raise ValueError(f"the states of {cls.__name__} cannot be told before its first step ({e}): give optimizer a number of bytes") from e
    return sum(_bytes(state) for state in trial.state.values())


def _without_data(p: torch.Tensor) -> torch.nn.Parameter:
    like = torch.nn.Parameter(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta"))
    like.grad = torch.empty_like(like)
    return like


def _bytes(state: dict[str, Any]) -> int:
    return sum(t.nbytes for t in state.values() if isinstance(t, torch.Tensor))
