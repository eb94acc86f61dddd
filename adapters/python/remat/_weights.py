# SPDX-License-Identifier: Apache-2.0
"""Weights in memory-mapped files: the operating system evicts their pages and reads them back on demand."""

from __future__ import annotations

import mmap

import torch

from . import _core, _torch
from ._disk import PLAIN, Disk, Layout


def move(model: torch.nn.Module, disk: Disk) -> bool:
    """Moves parameters and buffers of `model` into files. The tensor objects stay the same, and share memory as before.

    Returns True if any tensor has moved. Raises NoSpace before any tensor has moved.
    """
    found = [(storage, tensors) for storage, tensors in storages(model)
             if storage.device.type == "cpu" and storage.nbytes() >= mmap.PAGESIZE and not disk.holds(tensors[0])]
    homes = disk.reserve(Layout((storage.nbytes(),), (1,), torch.uint8) for storage, _ in found)
    for (storage, tensors), home in zip(found, homes):
        disk.write(home, torch.empty(0, dtype=torch.uint8).set_(storage))
        _rebase(tensors, home.untyped_storage())
        _torch.evict([home])
    if found:
        _core.trim()
    return bool(found)


def bring_back(model: torch.nn.Module, disk: Disk) -> None:
    """Moves parameters and buffers of `model` from `disk` to ordinary memory."""
    for storage, tensors in storages(model):
        if disk.holds(tensors[0]):
            _rebase(tensors, storage.clone())


def storages(model: torch.nn.Module) -> list[tuple[torch.UntypedStorage, list[torch.Tensor]]]:
    """Storages of parameters and buffers, each with the tensors in it."""
    found: dict[int, tuple[torch.UntypedStorage, list[torch.Tensor]]] = {}
    for t in (*model.parameters(), *model.buffers()):
        if type(t) in PLAIN and t.layout is torch.strided and not t.is_quantized and not t.is_meta:
            storage = t.untyped_storage()
            found.setdefault(storage._cdata, (storage, []))[1].append(t)
    return list(found.values())


def _rebase(tensors: list[torch.Tensor], storage: torch.UntypedStorage) -> None:
    for t in tensors:
        t.data = torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())
