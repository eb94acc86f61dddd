# SPDX-License-Identifier: Apache-2.0
"""Tensors on a disk: ordinary tensors of the host in memory-mapped files."""

from __future__ import annotations

import math
import mmap
import os
from typing import Iterable, NamedTuple

import torch

from . import _core, _torch
from ._errors import NoSpace, Refused

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)  #: classes of plain tensors, which have a storage of their own


class Layout(NamedTuple):
    """Size, strides and type of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: torch.Tensor) -> Layout:
        return cls(tuple(t.shape), t.stride(), t.dtype)

    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    def room(self) -> int:
        """Bytes of the tensor, rounded up to whole pages."""
        return -(-self.bytes() // mmap.PAGESIZE) * mmap.PAGESIZE


def movable(t: object) -> bool:
    """True if `t` can be in a file and has at least a page."""
    return (type(t) is torch.Tensor and t.layout is torch.strided and t.device.type == "cpu" and not t.requires_grad
            and not t.is_quantized and t.nbytes >= mmap.PAGESIZE and torch.empty_like(t, device="meta").stride() == t.stride())


class Disk:
    """A folder whose disk holds tensors. The files have no names, only this process can read them, and a file goes with its last tensor."""

    def __init__(self, folder: str | os.PathLike[str], budget: str | None = None):
        """budget: largest number of bytes reserved at a time, as text; None: no limit.

        Raises Error if no file can be made in the folder; NoSpace if the disk is full.
        """
        self.folder = os.fspath(folder)
        self.options = self.folder, budget
        self.budget = None if budget is None else _core.parse_bytes(budget)
        self._files = _torch.Disk(self.folder)
        self._process = os.getpid()

    reserved = property(lambda self: self._files.reserved)  #: bytes reserved now
    written = property(lambda self: self._files.evicted)  #: bytes written since construction
    read = property(lambda self: self._files.fetched)  #: bytes read since construction

    def reserve(self, layouts: Iterable[Layout]) -> list[torch.Tensor]:
        """Makes zero tensors in a new file. All its disk space is allocated at once.

        Raises NoSpace, or Refused in a process forked since.
        """
        layouts = list(layouts)
        total = sum(layout.room() for layout in layouts)
        if total > 0:
            self.check_process()
        if self.budget is not None and total > self.budget - self.reserved:
            raise NoSpace(f"disk_budget={self.budget}", self.folder, total, self.budget - self.reserved)
        return self._files.reserve([torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in layouts])

    def holds(self, t: torch.Tensor) -> bool:
        """True if `t` is in a file of this disk."""
        return type(t) in PLAIN and self._files.holds(t)

    def write(self, to: torch.Tensor, value: torch.Tensor) -> None:
        """Copies `value` to a tensor in a file of this disk, by a write to the file instead of its mapping. Raises CopyFailed."""
        self._files.write(to, value)

    def take_gradient(self, parameter: torch.Tensor, home: torch.Tensor) -> None:
        """Moves the gradient of a parameter into `home`, a tensor in a file of this disk. Backwards on other threads may add to the gradient before or after
        the move, but not meanwhile. Raises CopyFailed."""
        self._files.take_gradient(parameter, home)

    def check_process(self) -> None:
        """Raises Refused in a process forked since: the files belong to the parent, which would see the writes."""
        if os.getpid() != self._process:
            raise Refused("the states of this optimizer are in files of the process that this one was forked from",
                          advice="make the optimizer in the process that trains")


def in_file(t: torch.Tensor) -> bool:
    """True if `t` is in a file of any disk."""
    return type(t) in PLAIN and _torch.on_a_disk(t)


def evict(tensors: list[torch.Tensor]) -> None:
    """Writes tensors to their disks and evicts their pages from memory. Other tensors are ignored. If it raises CopyFailed, the tensors are still in memory."""
    _torch.evict(tensors)
