# SPDX-License-Identifier: Apache-2.0
"""Patches of PyTorch functions that need things a step without data lacks: memory, generator states, kernels in Python."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import sys
import threading
import types
from typing import Any, Callable, Iterator

import torch
import torch.utils.checkpoint
import torch.utils.dlpack
from torch._functorch.autograd_function import custom_function_call

from . import _torch
from ._errors import Refused

_READS = ("const_data_ptr", "__reduce_ex__", "__deepcopy__", "is_pinned")
_OBSERVES = ("register_hook", "retain_grad")
_SHARES = ("numpy", "data_ptr", "__array__", "__dlpack__")  # methods that expose the memory, so that it may be written, too
_OF_GENERATORS = ("get_state", "clone_state", "graphsafe_get_state", "initial_seed", "get_offset", "philox_state", "__reduce__")
_OF_STORAGES = ("__getitem__", "__setitem__", "_byteswap", "_get_filename", "_get_shared_fd", "_set_from_file", "_share_cuda_", "_share_fd_cpu_",
                "_share_filename_cpu_", "_write_file", "copy_", "data_ptr", "fill_", "resize_", "is_shared", "share_memory_", "is_pinned",
                "pin_memory")


def _call_before(original: Callable[..., Any], tell: Callable[..., Any], passed: int = 1) -> Callable[..., Any]:
    """Wraps `original`: calls `tell` first with the first `passed` arguments. `tell` runs pending kernels."""
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        tell(*(*args, *kwargs.values())[:passed])
        return original(*args, **kwargs)

    return method


def _tolist(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `tolist`: in a forward without data, copies the tensor to the host first. A copy made inside `tolist` would have no data yet."""
    @functools.wraps(original)
    def tolist(self: torch.Tensor) -> Any:
        at = self.cpu() if _torch.without_data() else self
        _torch.about_to_read(at, may_write=False)
        return original(at)

    return tolist


def _observing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method that may begin to watch the gradient of its tensor."""
    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _torch.observing(self, original, *args, **kwargs)

    return method


def _leave_for_thread() -> None:
    if _torch.without_data():
        _torch.fall_back_to_eager(f"work is given to another thread at {_where()}")


def _setitem(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `__setitem__`: adds a dimension to a value without dimensions. For such values PyTorch compares the addresses of both tensors."""
    @functools.wraps(original)
    def setitem(self: torch.Tensor, index: Any, value: Any) -> None:
        one = _is_plain(self) and _is_plain(value) and value.dim() == 0
        if one and _torch.without_data() and value.untyped_storage()._cdata != self.untyped_storage()._cdata:
            value = value[None]
        original(self, index, value)

    return setitem


def _leave_for_storage() -> None:
    if _torch.without_data():
        _torch.fall_back_to_eager(f"a storage is used directly at {_where()}")


def _data() -> property:
    """The property `Tensor.data`. An assignment puts other memory under a tensor. A forward without data copies the values instead, if the difference
    is invisible. Otherwise it leaves the plan: pending calls run on the old memory first."""
    descriptor: Any = torch.Tensor.data

    def put(self: torch.Tensor, other: torch.Tensor) -> None:
        if not _torch.without_data() or _is_same_memory(self, other):
            return descriptor.__set__(self, other)  # type: ignore[no-any-return]
        if sys.getrefcount(other) <= nobody_else and _is_like(self, other) and _torch.may_copy(self, other):
            descriptor.__get__(self).copy_(other)
            return None
        _torch.fall_back_to_eager("other memory is put under a tensor, and something else uses one of the two "
                          f"(`.data = ...`, where `.data.copy_(...)` is planned) at {_where()}")
        return descriptor.__set__(self, other)  # type: ignore[no-any-return]

    class Example:
        data = property(fset=lambda self, other: counts.append(sys.getrefcount(other)))

    def held() -> Any:  # a tensor that C++ holds as well, like results of calls
        leaf.grad = torch.zeros(())
        return leaf.grad

    counts: list[int] = []
    leaf = torch.zeros((), requires_grad=True)
    Example().data = held()
    nobody_else = counts[0]
    return property(descriptor.__get__, put, doc=descriptor.__doc__)


class _Parts(threading.local):
    """Parts under `torch.utils.checkpoint` in the forward that this thread runs."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int, bool]] = []  # parts that ran without data: first call, end of the calls, whether all calls run again
        self.began: int | None = None  # in a reentrant part: number of its first node of autograd. Eager mode makes no nodes there
        self.for_some = False  # the backward is for chosen tensors, which reentrant autograd does not support


_parts = _Parts()


@contextlib.contextmanager
def recomputed() -> Iterator[None]:
    """A context for a forward without data. Eager mode repeats the writes of parts under checkpoints, such as running statistics, in the backward.
    The context repeats them at its end, the last part first."""
    before, _parts.done = _parts.done, []
    try:
        yield
        for part in reversed(_parts.done):
            _torch.repeat_writes(*part)
    finally:
        _parts.done = before


@contextlib.contextmanager
def for_some_gradients() -> Iterator[None]:
    """A context for a forward with data whose backward is for chosen tensors."""
    before, _parts.for_some = _parts.for_some, True
    try:
        yield
    finally:
        _parts.for_some = before


@contextlib.contextmanager
def _part(since: int, all_runs_again: bool) -> Iterator[None]:
    yield
    if (until := _torch.calls_until_now()) is not None:
        _parts.done.append((since, until, all_runs_again))


def _checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the generator of a non-reentrant checkpoint. In a step without data the part runs without checkpointing logic, as the planner decides what
    to recompute."""
    def kept(since: int) -> Iterator[None]:
        with _part(since, False):
            yield

    @functools.wraps(original)
    def generator(*args: Any, **kwargs: Any) -> Any:
        since = _torch.calls_until_now()
        return original(*args, **kwargs) if since is None else kept(since)

    return generator


def _reentrant(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        trained = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if trained and _parts.for_some:
            with torch.utils.checkpoint.set_checkpoint_early_stop(False):
                return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
        if not _torch.without_data():
            return original(function, preserve, *args)
        since = _torch.calls_until_now()
        if since is None and trained:
            raise Refused("torch.utils.checkpoint with use_reentrant=True runs a backward of its own",
                          advice="follow=True, use_reentrant=False, or no checkpoint: the planner decides what is recomputed")
        began = _parts.began
        torch.utils.checkpoint.check_backward_validity([a for a in args if isinstance(a, torch.Tensor) and _made_before(a, began)])  # may warn
        if trained and began is None:
            _parts.began = torch._C._autograd._get_sequence_nr()
        try:
            with torch.set_grad_enabled(trained), _part(since, True) if trained else contextlib.nullcontext():
                return function(*args)
        finally:
            _parts.began = began

    return apply


def _made_before(t: torch.Tensor, node: int | None) -> bool:
    """True if the graph of `t` was complete before the node with this number; None: always."""
    return node is None or t.grad_fn is None or t.grad_fn._sequence_nr() < node


def _geometry(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, t.shape, t.stride(), t.storage_offset(), t.is_conj(), t.is_neg()


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if both tensors have the same storage and the same geometry."""
    return _is_plain(a) and _is_plain(b) and a.untyped_storage()._cdata == b.untyped_storage()._cdata and _geometry(a) == _geometry(b)


def _is_like(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if both tensors have the same type, device and geometry, and storages of equal size."""
    return (_is_plain(a) and _is_plain(b) and not b.requires_grad and a.device == b.device and _geometry(a) == _geometry(b)
            and a.untyped_storage().nbytes() == b.untyped_storage().nbytes())


def _is_plain(t: Any) -> bool:
    """True for a strided tensor or parameter of PyTorch's own classes. Excludes subclasses such as uninitialized parameters."""
    return type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided


def _where() -> str:
    """The innermost line of the model that is running, as "file:line"."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


_NOT_THE_MODEL = (torch.__path__[0], __file__.rpartition("/")[0])


def _higher_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the call of higher-order operators: their arguments are functions, so no plan can hold them."""
    @functools.wraps(original)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        recorded = self is custom_function_call
        if not recorded and _torch.without_data():
            _torch.fall_back_to_eager(f"the higher-order operator {self.name()} runs at {_where()}")
        return _torch.without_recording_keys(recorded, original, self, *args, **kwargs)

    return call


def _compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the callback that PyTorch calls before compiled code runs."""
    @functools.wraps(original)
    def callback(given: Any) -> Any:
        found = original(given)
        if found is not None and _torch.without_data():
            _torch.fall_back_to_eager(f"code that torch.compile has compiled, or is to compile, runs at {_where()}")
        return found

    return callback


@functools.cache
def _watch_compiled() -> None:
    at = sys.modules["torch._dynamo.eval_frame"]
    at._callback_from_stance = _compiled(at._callback_from_stance)  # type: ignore[attr-defined]


def _compiler(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `torch.compile`, which imports the module that `_watch_compiled` patches."""
    @functools.wraps(original)
    def compiler(*args: Any, **kwargs: Any) -> Any:
        compiled = original(*args, **kwargs)
        if "torch._dynamo.eval_frame" in sys.modules:
            _watch_compiled()
        return compiled

    return compiler


def _setattr(original: Callable[..., Any], take_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Module.__setattr__` for `forward`. Some trainers give a model a new forward that does not call the old one."""
    @functools.wraps(original)
    def setattr(self: torch.nn.Module, name: str, value: Any) -> None:
        original(self, name, take_forward(self, value) if name == "forward" else value)

    return setattr


@functools.cache
def install(drop_plans_of: Callable[..., None], take_forward: Callable[..., Any]) -> None:
    """Installs all patches, once per process. From then on the planner, and not `torch.utils.checkpoint`, decides what to recompute in planned steps.

    drop_plans_of: called with two tensors that are about to be swapped.
    take_forward: called with a module and its new forward; returns the forward to set.
    """
    for names, may_write in ((_READS, False), (_SHARES, True)):
        for name in names:
            if (original := getattr(torch.Tensor, name, None)) is not None:
                setattr(torch.Tensor, name, _call_before(original, functools.partial(_torch.about_to_read, may_write=may_write)))
    for module in (torch, torch.utils.dlpack):
        module.to_dlpack = _call_before(module.to_dlpack, functools.partial(_torch.about_to_read, may_write=True))  # type: ignore[attr-defined]
    for owner, name in ((threading.Thread, "start"), (concurrent.futures.ThreadPoolExecutor, "submit")):
        setattr(owner, name, _call_before(getattr(owner, name), _leave_for_thread, 0))
    for name in _OF_STORAGES:
        setattr(torch.UntypedStorage, name, _call_before(getattr(torch.UntypedStorage, name), _leave_for_storage, 0))
    torch.Tensor.data = _data()  # type: ignore[assignment]
    torch.Tensor.__setitem__ = _setitem(torch.Tensor.__setitem__)  # type: ignore[method-assign]
    torch.Tensor.tolist = _tolist(torch.Tensor.tolist)  # type: ignore[method-assign]
    for name in _OBSERVES:
        setattr(torch.Tensor, name, _observing(getattr(torch.Tensor, name)))
    for name in _OF_GENERATORS:
        _torch.set_method(torch.Generator, name, _call_before(getattr(torch.Generator, name), _torch.about_to_read_generator))
    torch.utils.swap_tensors = _call_before(torch.utils.swap_tensors, drop_plans_of, 2)
    torch.nn.Module.__setattr__ = _setattr(torch.nn.Module.__setattr__, take_forward)  # type: ignore[method-assign]
    operator = torch._ops.HigherOrderOperator
    operator.__call__ = _higher_order(operator.__call__)  # type: ignore[method-assign]
    if "torch._dynamo.eval_frame" in sys.modules:
        _watch_compiled()
    torch.compile = _compiler(torch.compile)
    at = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator_impl"
    setattr(at, name, _checkpoint(getattr(at, name)))
    at.CheckpointFunction.apply = _reentrant(at.CheckpointFunction.apply)
