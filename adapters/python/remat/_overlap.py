# SPDX-License-Identifier: Apache-2.0
"""Steps of parameters during the backward, and checks that nobody needs their gradients afterwards."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from . import _torch
from ._errors import CopyFailed, Refused

if TYPE_CHECKING:
    from ._optimizer import _Offloaded

_hooks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # per parameter: the `Overlap` of its optimizer, and the hooks. A parameter steps for one optimizer


def steps_at_once(p: torch.Tensor) -> bool:
    """True if `p` steps as soon as its gradient is complete."""
    overlap = _hooks[p][0]() if p in _hooks else None
    return overlap is not None and overlap._first_step_done


def call_last(p: torch.Tensor) -> None:
    """Registers the stepping hooks of `p` anew, so that they run after all hooks registered in the meantime."""
    if p in _hooks:
        owner = _hooks[p][0]
        detach(p)
        _register(owner, p)


class Spent(torch.Tensor):
    """Placeholder for a gradient that has been used and freed, until the step ends. Refuses all operations."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _refusal(f"{getattr(func, '__name__', func)} reads a gradient that is freed already")


class Overlap:
    """Steps the parameters of one optimizer between two calls of its `step()`."""

    def __init__(self, optimizer: _Offloaded, accumulate: int):
        """accumulate: number of backwards whose gradients add up before a parameter steps."""
        self._optimizer = weakref.ref(optimizer)
        self._accumulate = accumulate
        self._gradient_counts: dict[torch.Tensor, int] = {}  # number of gradients per parameter since the last step
        self._first_step_done = False  # a complete first step has shown that nobody needs the gradients later
        self._held: dict[torch.Tensor, tuple[torch.Tensor, Any]] = {}  # per parameter, until `_first_step_done`: its gradient and `_fingerprint` of it
        self._applied: dict[torch.Tensor, None] = {}  # parameters that have stepped
        self._lifted: set[torch.Tensor] = set()  # parameters that have stepped and are about to receive another gradient
        self._settings: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}  # groups, with their options at their first gradient
        self._order: dict[torch.Tensor, torch.Tensor] = {}  # per parameter: the next one in the order of gradients of the last step
        self._last: torch.Tensor | None = None
        self._groups: dict[torch.Tensor, dict[Any, Any]] = {}
        self._traffic: _torch.Traffic | None = None
        self.dropped = False  # `give_up` has dropped gradients that no step has used
        self._before = 0, 0

    def attach(self, optimizer: _Offloaded) -> None:
        """Registers the hooks of all trainable parameters."""
        self._regroup(optimizer)
        me = weakref.ref(self)
        for p in self._groups:
            if p.requires_grad and p.is_leaf and not (p in _hooks and _hooks[p][0]() is self):
                detach(p)
                _register(me, p)

    def _regroup(self, optimizer: _Offloaded) -> None:
        self._groups = {p: group for group in optimizer.param_groups for p in group["params"]}

    def check_idle(self, what: str) -> None:
        """Raises Refused between a backward and its step."""
        if self._applied or self._held:
            raise _refusal(f"{what} came between backward and step(): call step() first, or load_state_dict() to drop what the backward left")

    def give_up(self) -> None:
        """Drops the gradients since the last step. Called when states are loaded, usually after a refusal or failure."""
        if self._applied or self._held:
            self.dropped = True
            self._clear()

    def _clear(self) -> None:
        for p in self._groups:
            p.grad = None
        for found in (self._held, self._applied, self._lifted, self._settings, self._gradient_counts):
            found.clear()
        if self._traffic is not None:
            self._traffic.wait()
            self._traffic = None

    def _coming(self, p: torch.Tensor) -> None:
        if p in self._applied and isinstance(p.grad, Spent):
            self._lifted.add(p)  # autograd cannot add to the placeholder; `_arrived` refuses the new gradient
            p.grad = None

    def _arrived(self, p: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if not (self._applied or self._held):
            self._regroup(optimizer)
        group = self._groups.get(p)
        if group is None or p.grad is None:
            return
        self._gradient_counts[p] = self._gradient_counts.get(p, 0) + 1
        if self._gradient_counts[p] < self._accumulate:
            return
        if p in self._applied or p in self._held:
            raise _refusal("one gradient more of a parameter came before step(): gradients are accumulated, or the backward is run twice",
                           "accumulate=, the number of backwards before each step(), or step=\"after\"")
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise _refusal("gradients of other processes come later")
        self.dropped = False
        if id(group) not in self._settings:
            self._settings[id(group)] = group, _settings(group)
        if not self._first_step_done:
            self._held[p] = p.grad, _fingerprint(p.grad)
            return
        optimizer._prepare([(group, p)])
        if optimizer._disk is None:
            optimizer._apply(group, [p])
        else:
            self._apply_on_disk(optimizer, group, p)
        self._applied[p] = None
        torch.autograd.graph.increment_version(p)  # fused kernels do not, and a backward that still needs the old values of `p` must notice
        optimizer._freed += p.grad.numel() * p.grad.element_size()
        p.grad = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape).as_subclass(Spent)
        optimizer._trim()

    def _apply_on_disk(self, optimizer: _Offloaded, group: dict[str, Any], p: torch.Tensor) -> None:
        if self._traffic is None:
            self._traffic, self._last = _torch.Traffic(), None
            optimizer._check_free_memory()
            self._before = optimizer._disk.evicted, optimizer._disk.fetched
        try:
            self._traffic.ready(id(p), optimizer._disk_states([p]))
            following = self._order.get(p)
            if following is not None:
                self._traffic.ahead(id(following), optimizer._disk_states([following]))
            optimizer._apply(group, [p])
        except CopyFailed as e:
            raise optimizer._failed(f"{e}; {len(self._applied)} parameters have made the step. Load a checkpoint") from e
        self._traffic.done(optimizer._disk_states([p]) + optimizer._unneeded([p]))
        if self._last is not None:
            self._order[self._last] = p
        self._last = p

    def finish(self, optimizer: _Offloaded, closure: Callable[[], Any] | None) -> None:
        """Ends a step: checks that nobody used or changed the gradients, and steps the remaining parameters."""
        if closure is not None:
            raise _refusal("step(closure) computes the loss when all parameters are as they were")
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise _refusal("a GradScaler divides gradients when all are there")
        if self.dropped:
            raise _refusal("load_state_dict() came between backward and step(), and dropped the gradients")
        for p, (grad, was) in self._held.items():
            if p.grad is not grad or _fingerprint(grad) != was:
                raise _refusal("a gradient was changed between backward and step(), as clipping does")
        for p in self._applied:
            if not isinstance(p.grad, Spent) and not (p.grad is None and p in self._lifted):
                raise _refusal("a gradient was replaced or removed between backward and step()")
        for group, settings in self._settings.values():
            if not _equal(_settings(group), settings):
                raise _refusal("options of a parameter group were changed between backward and step()", "change them after step()")
        for p in self._applied:
            p.grad = None
        if not self._first_step_done:
            optimizer._prepare([(group, p) for p, group in self._groups.items() if p.requires_grad])
        traffic, self._traffic = self._traffic, None
        if traffic is not None:
            traffic.wait()
        optimizer._step_all()  # parameters that have not stepped: all in the first step, or those with a gradient set by hand
        if traffic is not None:
            optimizer._bytes = optimizer._disk.evicted - self._before[0], optimizer._disk.fetched - self._before[1]
        if self._held or self._applied:
            self._first_step_done = True
        self._clear()
        self.attach(optimizer)  # parameters that have become trainable
        if traffic is not None:
            optimizer._check_traffic(traffic)


def detach(p: torch.Tensor) -> None:
    """Removes the stepping hooks of a parameter."""
    if p in _hooks:
        for hook in _hooks.pop(p)[1]:
            hook.remove()


def _register(me: weakref.ref[Any], p: torch.Tensor) -> None:
    here = weakref.ref(p)
    _hooks[p] = me, (p.register_hook(lambda grad: _tell(me, Overlap._coming, here())),
                     p.register_post_accumulate_grad_hook(lambda p: _tell(me, Overlap._arrived, p)))


def _tell(me: weakref.ref[Any], what: Callable[..., Any], p: torch.Tensor | None) -> None:
    overlap = me()
    if overlap is not None:
        what(overlap, p)


def _fingerprint(grad: torch.Tensor) -> tuple[int, int]:
    """A fingerprint that changes with a write: version and a sum of the bits. The sum finds writes without a new version (`GradScaler.unscale_`)."""
    values = (grad._values() if grad.is_sparse else grad).detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    return grad._version, int(values.view(integers).sum().item())


def _settings(group: dict[Any, Any]) -> dict[Any, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


def _equal(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) and isinstance(b[k], torch.Tensor)
                                        else type(a[k]) is type(b[k]) and a[k] == b[k] for k in a)


def _refusal(reason: str, advice: str = "step=\"after\"") -> Refused:
    return Refused(f"{reason}: with step=\"overlap\" parameters step as soon as their gradients are there", advice=advice)
