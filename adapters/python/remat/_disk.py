# SPDX-License-Identifier: Apache-2.0
"""Tensors in files: ordinary tensors of the host whose pages the disk holds."""

from __future__ import annotations

import math
import mmap
import os
from typing import Iterable, NamedTuple

import torch

from . import _core, _torch
from ._errors import NoSpace, Refused

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)  #: what has memory of its own


class Layout(NamedTuple):
    """What a tensor looks like."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, t: torch.Tensor) -> Layout:
        return cls(tuple(t.shape), t.stride(), t.dtype)

    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    def room(self) -> int:
        """Bytes of whole pages."""
        return -(-self.bytes() // mmap.PAGESIZE) * mmap.PAGESIZE


def movable(t: object) -> bool:
    """Can `t` be in a file, and would that save a page or more?"""
    return type(t) is torch.Tensor and not t.requires_grad and _torch.movable(t)


class Disk(_torch.Disk):
    """A folder whose disk holds tensors. Its files have no name, are readable by nobody else, and go with their tensors."""

    def __init__(self, folder: str | os.PathLike[str], budget: str | None = None):
        """Raises Error if no file can be made in the folder; NoSpace if the disk is full."""
        self.folder = os.fspath(folder)
        super().__init__(self.folder)
        self.options = self.folder, budget
        self.budget = None if budget is None else _core.parse_bytes(budget)
        self._process = os.getpid()

    def reserve(self, layouts: Iterable[Layout]) -> list[torch.Tensor]:  # type: ignore[override]
        """Tensors in a new file, all of whose space is set aside; they are zero.

        Raises NoSpace, or Refused in a process that was forked since.
        """
        layouts = list(layouts)
        total = sum(layout.room() for layout in layouts)
        if total > 0:
            self.check_process()
        if self.budget is not None and total > self.budget - self.reserved:
            raise NoSpace(f"disk_budget={self.budget}", self.folder, total, self.budget - self.reserved)
        return super().reserve([torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in layouts])

    def holds(self, t: torch.Tensor) -> bool:
        """Is `t` in a file of this disk?"""
        return type(t) in PLAIN and super().holds(t)

    def check_process(self) -> None:
        """Raises Refused in a process that was forked since: the files are its parent's, who would see what is written."""
        if os.getpid() != self._process:
            raise Refused("the states of this optimizer are in files of the process that this one was forked from",
                          advice="make the optimizer in the process that trains")


def in_file(t: torch.Tensor) -> bool:
    """Is `t` in a file of some disk?"""
    return type(t) in PLAIN and _torch.on_a_disk(t)
