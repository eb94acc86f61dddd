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
    return (type(t) is torch.Tensor and t.layout is torch.strided and t.device.type == "cpu" and not t.requires_grad
            and not t.is_quantized and t.nbytes >= mmap.PAGESIZE and torch.empty_like(t, device="meta").stride() == t.stride())


class Disk:
    """A folder whose disk holds tensors. Its files have no name, are readable by nobody else, and go with their tensors."""

    def __init__(self, folder: str | os.PathLike[str], budget: str | None = None):
        """Raises Error if no file can be made in the folder; NoSpace if the disk is full."""
        self.folder = os.fspath(folder)
        self.options = self.folder, budget
        self.budget = None if budget is None else _core.parse_bytes(budget)
        self._files = _torch.Disk(self.folder)
        self._process = os.getpid()

    reserved = property(lambda self: self._files.reserved)  #: bytes, now
    written = property(lambda self: self._files.evicted)  #: bytes, ever, as is
    read = property(lambda self: self._files.fetched)  #: this

    def reserve(self, layouts: Iterable[Layout]) -> list[torch.Tensor]:
        """Tensors in a new file, all of whose space is set aside; they are zero.

        Raises NoSpace, or Refused in a process that was forked since.
        """
        layouts = list(layouts)
        total = sum(layout.room() for layout in layouts)
        if total > 0:
            self.check_process()
        if self.budget is not None and total > self.budget - self.reserved:
            raise NoSpace(f"disk_budget={self.budget}", self.folder, total, self.budget - self.reserved)
        return self._files.reserve([torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in layouts])

    def holds(self, t: torch.Tensor) -> bool:
        """Is `t` in a file of this disk?"""
        return type(t) in PLAIN and self._files.holds(t)

    def write(self, to: torch.Tensor, value: torch.Tensor) -> None:
        """Copies to a tensor in a file of this disk, not through its mapping. Raises CopyFailed."""
        self._files.write(to, value)

    def take_gradient(self, parameter: torch.Tensor, home: torch.Tensor) -> None:
        """Puts the gradient of a parameter into a tensor in a file of this disk; backwards on other threads add to it before or after. Raises CopyFailed."""
        self._files.take_gradient(parameter, home)

    def check_process(self) -> None:
        """Raises Refused in a process that was forked since: the files are its parent's, who would see what is written."""
        if os.getpid() != self._process:
            raise Refused("the states of this optimizer are in files of the process that this one was forked from",
                          advice="make the optimizer in the process that trains")


def in_file(t: torch.Tensor) -> bool:
    """Is `t` in a file of some disk?"""
    return type(t) in PLAIN and _torch.on_a_disk(t)


def evict(tensors: list[torch.Tensor]) -> None:
    """Writes tensors to their disks and takes their pages out of memory; others stay. Raises CopyFailed, and then they are still there."""
    _torch.evict(tensors)
