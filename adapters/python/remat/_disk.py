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
    return type(t) is torch.Tensor and not t.requires_grad and _torch.movable(t)


class Disk(_torch.Disk):
    """A folder whose disk holds tensors. The files have no names, only this process can read them, and a file goes with its last tensor."""

    def __init__(self, folder: str | os.PathLike[str], budget: str | None = None):
        """budget: largest number of bytes reserved at a time, as text; None: no limit.

        Raises Error if no file can be made in the folder; NoSpace if the disk is full.
        """
        self.folder = os.fspath(folder)
        super().__init__(self.folder)
        self.options = self.folder, budget
        self.budget = None if budget is None else _core.parse_bytes(budget)
        self._process = os.getpid()

    def reserve(self, layouts: Iterable[Layout]) -> list[torch.Tensor]:  # type: ignore[override]
        """Makes zero tensors in a new file. All its disk space is allocated at once.

        Raises NoSpace, or Refused in a process forked since.
        """
        layouts = list(layouts)
        total = sum(layout.room() for layout in layouts)
        if total > 0:
            self.check_process()
        if self.budget is not None and total > self.budget - self.reserved:
            raise NoSpace(f"disk_budget={self.budget}", self.folder, total, self.budget - self.reserved)
        return super().reserve([torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in layouts])

    def holds(self, t: torch.Tensor) -> bool:
        """True if `t` is in a file of this disk."""
        return type(t) in PLAIN and super().holds(t)

    def check_process(self) -> None:
        """Raises Refused in a process forked since: the files belong to the parent, which would see the writes."""
        if os.getpid() != self._process:
            raise Refused("the states of this optimizer are in files of the process that this one was forked from",
                          advice="make the optimizer in the process that trains")


def in_file(t: torch.Tensor) -> bool:
    """True if `t` is in a file of any disk."""
    return type(t) in PLAIN and _torch.on_a_disk(t)
