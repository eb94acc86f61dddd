# SPDX-License-Identifier: Apache-2.0
"""Models in memory of the host whose steps run on another device."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from . import _torch
from ._errors import Refused


def place(model: torch.nn.Module, device: torch.device) -> None:
    """Puts weights into page-locked memory of the host, and buffers on `device`. They stay the same objects."""
    _torch.pin_weights([p for p in model.parameters() if not p.is_meta], str(device))
    for b in model.buffers():
        b.data = b.data.to(device)


def leave(model: torch.nn.Module) -> None:
    """Puts buffers where the weights are."""
    for b in model.buffers():
        b.data = b.data.cpu()


def to_device(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """What a step is given may be on the host. Gradients come back through the copy."""
    return [t.to(device) if t.device.type == "cpu" else t for t in tensors]


class _Bringing(TorchFunctionMode):
    """Operators get weights of the host on the device."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") != "__get__":
            args, kwargs = tree_map_only(torch.nn.Parameter, lambda p: p.detach().to(self._device), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def run_plain(plain: Callable, args: tuple, kwargs: dict, device: torch.device) -> Any:
    """A forward without gradients, one weight on the device at a time. Raises Refused if it needs gradients."""
    if torch.is_grad_enabled():
        raise Refused(f"the weights are on the host, and a step that is not planned cannot train on {device}", advice="torch.no_grad(), or remat.unwrap(model)")
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs))
    with _Bringing(device):
        return plain(*args, **kwargs)
