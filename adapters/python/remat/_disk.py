# SPDX-License-Identifier: Apache-2.0
"""Tensors in files: ordinary tensors of the host whose pages the disk holds."""

from __future__ import annotations

import bisect
import collections
import concurrent.futures
import errno
import math
import mmap
import os
import threading
import weakref
from typing import Callable, Iterable, NamedTuple, Sequence

import torch

from . import _core, _torch
from ._errors import CopyFailed, NoSpace, Refused

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)  #: what has memory of its own
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


_disks: weakref.WeakSet = weakref.WeakSet()  # all of them


class _File(NamedTuple):
    pages: weakref.ref  # of the mapping, which the tensors in it hold
    number: int
    start: int  # address
    bytes: int


class Disk:
    """A folder whose disk holds tensors. Its files have no name, are readable by nobody else, and go with their tensors."""

    def __init__(self, folder: str | os.PathLike, budget: int | float | str | None = None):
        """Raises Error if no file can be made in the folder, or the budget is no size; NoSpace if the disk is full."""
        if isinstance(budget, (int, float)) and not isinstance(budget, bool):
            budget = f"{budget:.0f}"
        self.options = os.fspath(folder), budget
        self.folder = self.options[0]
        _torch.check_disk(self.folder, "" if budget is None else str(budget))
        self.budget = None if budget is None else _core.parse_bytes(str(budget))
        self.reserved = self.written = self.read = 0  # bytes: now, and ever
        self._files: dict[int, _File] = {}  # by their start
        self._starts: list[int] = []  # sorted, of these and perhaps of some that are gone
        self._growing = threading.Lock()
        self._process = os.getpid()
        _disks.add(self)

    def reserve(self, layouts: Iterable[Layout]) -> list[torch.Tensor]:
        """Tensors in a new file, all of whose space is set aside; they are zero.

        Raises NoSpace, or Refused in a process that was forked since.
        """
        layouts = list(layouts)
        total = sum(layout.room() for layout in layouts)
        if total == 0:
            return [torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype) for layout in layouts]
        self.check_process()
        if self.budget is not None and total > self.budget - self.reserved:
            raise NoSpace(f"disk_budget={self.budget}", self.folder, total, self.budget - self.reserved)
        number = _torch.open_nameless_file(self.folder)
        try:
            os.posix_fallocate(number, 0, total)  # where the file system cannot, the C library writes to every block
            pages = mmap.mmap(number, total)
        except OSError as e:
            os.close(number)
            if e.errno not in _FULL:
                raise CopyFailed(f"no file of {total} bytes could be made in {self.folder}: {e.strerror}") from e
            found = os.statvfs(self.folder)
            raise NoSpace(os.strerror(e.errno), self.folder, total, found.f_bavail * found.f_frsize) from e
        tensors, offset = [], 0
        for layout in layouts:
            data = torch.frombuffer(pages, dtype=torch.uint8, count=layout.bytes(), offset=offset).untyped_storage()
            tensors.append(torch.empty(0, dtype=layout.dtype).set_(data, 0, layout.size, layout.stride))
            offset += layout.room()
        start = tensors[0].data_ptr()
        with self._growing:
            self._files[start] = _File(weakref.ref(pages), number, start, total)
            self._starts = sorted(self._files)
            self.reserved += total
        weakref.finalize(pages, _end, weakref.ref(self), start, number, total, _torch.add_paged(start, total)).atexit = False
        return tensors

    def holds(self, t: torch.Tensor) -> bool:
        """Is `t` in a file of this disk?"""
        return type(t) in PLAIN and t.layout is torch.strided and t.device.type == "cpu" and self._file(t) is not None

    def write(self, to: torch.Tensor, value: torch.Tensor) -> None:
        """Copies to a tensor in a file of this disk, not through its mapping: pages that have never been written fault slowly.

        Raises CopyFailed.
        """
        file = self._file(to)
        try:
            _core.write(file.number, value.data_ptr(), value.nbytes, to.data_ptr() - file.start)
        except OSError as e:
            raise self._failed("write", value.nbytes, e) from e

    def check_process(self) -> None:
        """Raises Refused in a process that was forked since: the files are its parent's, who would see what is written."""
        if os.getpid() != self._process:
            raise Refused("the states of this optimizer are in files of the process that this one was forked from",
                          advice="make the optimizer in the process that trains")

    def fetch(self, tensors: list[torch.Tensor]) -> None:
        """Brings tensors into memory. Raises CopyFailed."""
        for file, offset, count in self._ranges(tensors):
            try:
                os.posix_fadvise(file.number, offset, count, os.POSIX_FADV_WILLNEED)
                _core.populate(file.start + offset, count)
            except OSError as e:
                raise self._failed("read", count, e) from e
            self.read += count

    def expect(self, tensors: list[torch.Tensor]) -> None:
        """Has tensors read that are about to be read or written, and does not wait for that."""
        for file, offset, count in self._ranges(tensors):
            os.posix_fadvise(file.number, offset, count, os.POSIX_FADV_WILLNEED)

    def evict(self, tensors: list[torch.Tensor]) -> None:
        """Writes tensors to the disk and takes their pages out of memory. Raises CopyFailed, and then they are still there."""
        for file, offset, count in self._ranges(tensors):
            try:
                _core.write_back(file.number, offset, count)
            except OSError as e:
                raise self._failed("write", count, e) from e
            file.pages().madvise(mmap.MADV_DONTNEED, offset, count)  # out of this process
            os.posix_fadvise(file.number, offset, count, os.POSIX_FADV_DONTNEED)  # and out of the system's cache
            self.written += count

    def _file(self, t: torch.Tensor) -> _File | None:
        at, starts = t.data_ptr(), self._starts
        file = self._files.get(starts[bisect.bisect_right(starts, at) - 1]) if starts else None
        return file if file is not None and file.start <= at < file.start + file.bytes else None

    def _ranges(self, tensors: list[torch.Tensor]) -> list[tuple[_File, int, int]]:
        """Their pages: file, offset, bytes; neighbours are one."""
        found: list[tuple[_File, int, int]] = []
        for t in sorted(tensors, key=torch.Tensor.data_ptr):
            file = self._file(t)
            offset = t.data_ptr() - file.start
            end = -(-(offset + t.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            offset = offset // mmap.PAGESIZE * mmap.PAGESIZE
            if found and found[-1][0] is file and found[-1][1] <= offset <= found[-1][1] + found[-1][2]:
                offset, end = found[-1][1], max(end, found[-1][1] + found[-1][2])
                found.pop()
            found.append((file, offset, end - offset))
        return found

    def _failed(self, what: str, count: int, e: OSError) -> CopyFailed:
        return CopyFailed(f"the disk at {self.folder}: {what} of {count} bytes failed: {e.strerror}")


class Traffic:
    """Fetches and evicts beside the computations, each on a thread of its own; at most two evictions are under way."""

    def __init__(self, disk: Disk):
        self.disk = disk
        self.failure: CopyFailed | None = None  # the first of writing
        self._reading, self._writing = (concurrent.futures.ThreadPoolExecutor(1, f"remat-{name}") for name in ("read", "write"))
        self._coming: dict[object, concurrent.futures.Future] = {}
        self._going: collections.deque[concurrent.futures.Future] = collections.deque()

    def ahead(self, key: object, tensors: list[torch.Tensor], also: Sequence[torch.Tensor] = ()) -> None:
        """What will be asked for next, and what will be read beside it, of any disk."""
        if tensors and key not in self._coming:
            self._coming[key] = self._reading.submit(self.disk.fetch, tensors)
            self._reading.submit(_each, Disk.expect, also)

    def ready(self, key: object, tensors: list[torch.Tensor]) -> None:
        """Waits until they are in memory. Raises CopyFailed."""
        self.ahead(key, tensors)
        if key in self._coming:
            self._coming.pop(key).result()

    def done(self, tensors: list[torch.Tensor]) -> None:
        """They have been written to, or are of no more use; those that are in no file stay where they are."""
        while len(self._going) > 1:
            self._collect()
        if tensors:
            self._going.append(self._writing.submit(_each, Disk.evict, tensors))

    def _collect(self) -> None:
        try:
            self._going.popleft().result()
        except CopyFailed as e:
            self.failure = self.failure or e

    def drain(self) -> None:
        """Waits for what is being written. What failed is in `failure`."""
        while self._going:
            self._collect()

    def close(self) -> None:
        """Waits for all, and ends."""
        self.drain()
        for pool in (self._reading, self._writing):
            pool.shutdown()


def in_file(t: torch.Tensor) -> bool:
    """Is `t` in a file of some disk?"""
    return any(disk.holds(t) for disk in list(_disks))


def _each(what: Callable[[Disk, list[torch.Tensor]], None], tensors: Sequence[torch.Tensor]) -> None:
    """Calls `what` for each disk that holds some of the tensors."""
    for disk in list(_disks):
        held = [t for t in tensors if disk.holds(t)]
        if held:
            what(disk, held)


def _end(disk: weakref.ref, start: int, number: int, total: int, mark: int) -> None:
    """A mapping is gone; another may be in its place by now."""
    _torch.remove_paged(start, mark)
    owner = disk()
    if owner is not None:
        owner.reserved -= total
        if start in owner._files and owner._files[start].number == number:
            del owner._files[start]
    os.close(number)
