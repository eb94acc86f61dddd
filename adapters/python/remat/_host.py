# SPDX-License-Identifier: Apache-2.0
"""Models with weights in memory of the host whose steps run on another device."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from . import _torch


def place(model: torch.nn.Module, device: torch.device, *, pinned: bool) -> None:
    """Moves weights to memory of the host, and buffers to `device`. The tensor objects stay the same.

    pinned: True moves all weights to page-locked memory. False leaves weights that are on the host where they are.
    """
    if pinned or any(p.device.type not in ("cpu", "meta") for p in model.parameters()):
        _torch.pin_weights([p for p in model.parameters() if not p.is_meta], str(device))
    for p in model.parameters():
        if p.grad is not None and p.device.type == "cpu":
            p.grad.data = p.grad.data.cpu()
    for b in model.buffers():
        b.data = b.data.to(device)


@contextlib.contextmanager
def unmoved(model: torch.nn.Module) -> Iterator[None]:
    """A context after which weights, their gradients and buffers are on their devices from before, if it ends with an exception."""
    before = [(t, t.device) for t in (*model.parameters(), *model.buffers())]
    try:
        yield
    except BaseException:
        for t, device in before:
            for moved in (t, t.grad):
                if moved is not None and moved.device != device:
                    moved.data = moved.data.to(device)
        raise


def leave(model: torch.nn.Module) -> None:
    """Moves buffers to the host."""
    for b in model.buffers():
        b.data = b.data.cpu()


def all_to_device(values: Any, device: torch.device) -> Any:
    """The values with all tensors on the device. Returns `values` itself if they are there already."""
    if all(t.device == device for t in tree_leaves(values) if isinstance(t, torch.Tensor)):
        return values
    return tree_map_only(torch.Tensor, lambda t: t.to(device), values)


def to_device(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies inputs on the host to the device. Gradients flow back through the copy."""
    return [t.to(device) if t.device.type == "cpu" else t for t in tensors]


class _Bringing(TorchFunctionMode):
    """A mode in which operators receive copies of weights on the device. Autograd saves a reference to the weight instead of the copy."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        #: copies and their weights, by storage, for the operator that runs now
        self._brought: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Any:
        self._saving.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._saving.__exit__(*exception)

    def _bring(self, p: torch.nn.Parameter) -> torch.Tensor:
        copy = p.to(self._device)
        self._brought[copy.untyped_storage()._cdata] = copy, p
        return copy

    def _pack(self, t: torch.Tensor) -> Any:
        brought = self._brought.get(t.untyped_storage()._cdata) if t.layout is torch.strided else None
        if brought is None:
            return t
        _, p = brought
        return p, p._version, t.dtype, t.shape, t.stride(), t.storage_offset()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        p, version, dtype, *layout = packed
        if p._version != version:
            raise RuntimeError(f"a weight of shape {tuple(p.shape)} that the backward needs was modified by an inplace operation after the forward: "
                               f"it is at version {p._version}; expected version {version}")
        weight: torch.Tensor = p.detach().to(self._device).view(dtype).as_strided(*layout)
        return weight

    def _write_back(self) -> None:
        """Copies weights that an operator has written back to the host."""
        for copy, p in self._brought.values():
            if copy is not p and copy._version:
                p.data.copy_(copy)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__" and isinstance(args[0], torch.nn.Parameter):
            return func(args[0], tree_map_only(torch.Tensor, lambda t: t.to(args[0].device), args[1]))
        if name in ("__get__", "__delete__"):
            return func(*args, **kwargs)
        try:
            result = func(*tree_map_only(torch.nn.Parameter, self._bring, args), **tree_map_only(torch.nn.Parameter, self._bring, kwargs))
            self._write_back()
            return result
        finally:
            self._brought.clear()


def run_plain(plain: Callable[..., Any], device: torch.device, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward on the device, with one weight there at a time. Its backward does likewise, and its gradients of weights go to the host."""
    if _torch.weights_disguised():  # the weights report the device as theirs
        return plain(*args, **kwargs)
    args, kwargs = all_to_device((args, kwargs), device)
    with _Bringing(device):
        return plain(*args, **kwargs)
