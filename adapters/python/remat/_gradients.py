# SPDX-License-Identifier: Apache-2.0
"""Gradients in files: each moves there as soon as it is complete, and stays an ordinary tensor."""

from __future__ import annotations

import weakref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from . import _overlap, _torch
from ._disk import PLAIN, Disk, Layout, movable


class _Home:
    """Memory in a file for the gradient of one parameter, used again in each step."""

    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self._storage = memory.untyped_storage()
        self._unused = self._uses()

    def _uses(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)

    def free(self) -> bool:
        """True if nobody holds the last gradient in this memory any more."""
        return self._uses() == self._unused


class Gradients:
    """Moves gradients of parameters into files of a disk."""

    def __init__(self, disk: Disk):
        self.disk = disk
        self._homes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # per parameter: the home of its last gradient
        self._hooks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._traffic = _torch.Traffic()
        self._backward = -1  # task of the last backward

    def attach(self, model: torch.nn.Module) -> None:
        """Moves the gradients of `model` from now on, and reserves disk space for them. Gradients of less than a page stay in memory.

        Raises NoSpace before anything has changed.
        """
        found = [p for p in model.parameters() if type(p) in PLAIN and p.requires_grad and p.is_leaf and p not in self._hooks
                 and movable(p.detach())]
        for p, memory in zip(found, self.disk.reserve(Layout.of(p) for p in found)):
            self._homes[p] = _Home(memory)
            me = weakref.ref(self)
            self._hooks[p] = p.register_post_accumulate_grad_hook(lambda p, me=me: me() and me()._arrived(p))
            _overlap.call_last(p)

    def detach(self) -> None:
        """Moves no more gradients. Gradients in files stay there."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._homes.clear()
        self._traffic = _torch.Traffic()  # waits for the end of the old one

    def _arrived(self, p: torch.Tensor) -> None:
        grad = p.grad
        if grad is None or _overlap.steps_at_once(p):
            return
        home = self._homes.get(p)
        if not self.disk.holds(grad):
            if not movable(grad):
                return
            self.disk.check_process()
            if home is None or not home.free() or not self.disk.holds(home.memory) or Layout.of(grad) != Layout.of(home.memory):
                home = self._homes[p] = _Home(*self.disk.reserve([Layout.of(grad)]))
            self.disk.take_gradient(p, home.memory)
            grad = p.grad
            assert grad is not None
        if self._backward != torch._C._current_graph_task_id():
            self._backward = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._traffic.drain)  # raises CopyFailed if a write has failed
        # Evicts through the tensor of the home, not the gradient: so the home counts as free while this gradient is still being written.
        self._traffic.done([home.memory if home is not None and home.memory.data_ptr() == grad.data_ptr() else grad])
