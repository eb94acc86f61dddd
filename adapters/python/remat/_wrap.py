# SPDX-License-Identifier: Apache-2.0
"""`wrap` and `unwrap`: put the planned forward into a model, and take it out again."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from typing import Any, Iterator, Literal, Mapping, TypeVar

import torch

from . import _host, _live, _patches, _torch
from ._errors import Error, Refused
from ._groups import Offload, Planner, flattened
from ._model_entries import FIXED_METHODS, NO_REPLICAS, SLOT
from ._options import arguments
from ._session import Session
from ._states import state_bytes
from ._wrap_options import Options

M = TypeVar("M", bound=torch.nn.Module)


def wrap(model: M, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *, budget: int | float | str | None = None,
         offload: Literal["none", "activations", "optimizer", "all", "auto"] | Offload = "none", disk: Any = None,
         host_budget: int | float | str | None = None, optimizer: torch.optim.Optimizer | int | float | str | None = None, cache: Any = True,
         on_refuse: Literal["raise", "warn"] = "warn", planner: Planner | None = None, **older: Any) -> M:
    """Makes `model` train within a budget of bytes. Outputs, gradients, buffers and generator equal those of the plain model bit by bit.

    model: any module; it is changed in place and returned. Its class, `state_dict`, attributes and methods stay as they are.
    args, kwargs: arguments of a training step, to plan at once. The forward runs once on tensors without data; attributes of modules and random
        generators are restored. Without arguments, or if the step cannot be planned this way, the first training call decides.
    budget: bytes for everything the step needs, as a number or as text: 8e9, "8 GB", "6 GiB"; or "60%" of the activations of
        a step that recomputes nothing, beyond what is held anyway. Default: no limit.
    offload: "activations" also moves values to a disk and back, beside the computations, where that is faster than to recompute them.
        "optimizer" keeps the states of `remat.optimizer(..., model=model)` on the disk. "all" does both, and moves weights and gradients into
        memory-mapped files; the operating system pages them, and they count for no budget. "auto" is "none" without a disk. With a disk it is
        "activations" if weights, gradients and two states of each parameter take at most half of `host_budget`, else "all". See `remat.Offload`.
    disk: folder for offloaded data, on a fast disk. Space is reserved when a plan is made, in files without names that go with the process.
    host_budget: upper limit of every budget on the host, in bytes, as a number or as text; weights and gradients in memory count. Default, if
        anything is offloaded: the bytes that the model takes now, and 0.8 of the memory that is free then, within limits of memory cgroups.
        For a model on an accelerator: bytes of page-locked memory for activations, in place of a disk.
    optimizer: the optimizer of the model, or the bytes of its states. The budget counts them from the first step on. Default: not counted.
    cache: True keeps plans on disk in the usual place; a folder keeps them there; False keeps none. Measured times of operators are always kept.
    on_refuse: for steps that cannot be planned. "warn" logs the cause once, and runs them plain. "raise" raises Refused before any number is produced.
    planner: how plans are made and checked.
    device: as `device` of `remat.Offload`: `remat.wrap(model, device="cuda", offload="all", ...)`.
    Other options of `remat.Planner` and `remat.Offload` may still be given one by one, until version 0.4.

    Without grad mode the model runs plain. To wrap a wrapped model again replaces its options. If `wrap` raises, the model is as before.
    Raises OverBudget if no schedule fits, Refused if the model cannot be captured, NoSpace if weights or gradients do not fit on the disk, Error or
    ValueError for options. A step raises CopyFailed if a disk fails.
    """
    groups = flattened(offload, planner, older)
    if isinstance(optimizer, torch.optim.Optimizer) and isinstance(model, torch.nn.Module):
        optimizer = state_bytes(optimizer, model)
    device = groups.pop("device")
    options = Options(budget=budget, on_refuse=on_refuse, cache=cache, host_budget=host_budget, disk=disk, optimizer=optimizer, **groups,
                      steps_on=None if device is None else _accelerator(device)).check()
    args, kwargs = arguments(args, kwargs)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"remat.wrap takes a torch.nn.Module, got {type(model).__qualname__}")
    if isinstance(model, torch.nn.DataParallel):
        raise Refused(NO_REPLICAS)
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise Refused("DistributedDataParallel averages gradients as they come, which is no part of a plan: wrap the module inside",
                      advice="DistributedDataParallel(remat.wrap(module))")
    if type(model).__module__.startswith("torch._dynamo"):
        raise Refused("remat.wrap takes the module itself, not what torch.compile made of it",
                      advice="wrap the module, then compile it")
    options = options.resolved_for(model)
    session = model.__dict__.get(SLOT)
    with _wrapping(model, options) if session is None else session._trying(options):
        session = of(model)
        session._native  # made now, to raise errors of options at once
        if args or kwargs:
            session._prepare(model, args, kwargs)
    return model


@contextlib.contextmanager
def _wrapping(model: torch.nn.Module, options: Options) -> Iterator[None]:
    """A context in which `model` is wrapped; it stays so, unless the context ends with an exception."""
    _live.free_unreferenced_models()
    _patches.install(_drop_plans_of, _take_forward)
    session = Session(model, options)
    model.__dict__.update(forward=_forward_of(model, session, model.__dict__.get("forward")), **{SLOT: session})
    for name, function in FIXED_METHODS.items():
        model.__dict__[name] = types.MethodType(function, model)
    with _host.unmoved(model):
        try:
            yield
        except BaseException:
            unwrap(model)
            raise


def _accelerator(device: str | torch.device) -> torch.device:
    """The accelerator named by `device`, with its index. Raises ValueError, TypeError or Error unless steps can run on it."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f'device must be a device such as "cuda", got {device!r}')
    try:
        found = torch.device(device)
    except RuntimeError as e:
        raise ValueError(f"device: {e}") from None
    if found.type in ("cpu", "meta"):
        raise ValueError(f"device must be an accelerator, got {str(found)!r}")
    try:
        _torch.check_device(str(found))
    except Error as e:
        raise Error(f"device={str(found)!r}: {e}") from None
    return torch.device(found.type, torch.accelerator.current_device_index()) if found.index is None else found


def unwrap(model: M) -> M:
    """Removes everything that `wrap` put into `model`, and returns the model. A model that is not wrapped stays as it is."""
    session = _session(model)
    if session is None:
        return model
    session.close()
    session._place_weights(model)
    forward = model.__dict__.get("forward")
    if getattr(forward, "__func__", None) in _planned_forwards:
        if session._original is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = session._original
        del model.__dict__[SLOT]
    else:
        return model  # other code has wrapped our forward: it must stay, and runs the model plain
    for name in FIXED_METHODS:
        model.__dict__.pop(name, None)
    return model


def is_wrapped(model: torch.nn.Module) -> bool:
    """True if `model` trains by plans."""
    session = _session(model)
    return session is not None and session._open


def of(model: torch.nn.Module) -> Session:
    """The session of a wrapped model.

    Raises Error if it is not wrapped.
    """
    session = _session(model)
    if session is None:
        raise Error(f"this {type(model).__qualname__} is not wrapped: call remat.wrap first")
    return session


def _session(model: Any) -> Session | None:
    return getattr(model, "__dict__", {}).get(SLOT)


def _drop_plans_of(*tensors: torch.Tensor) -> None:
    """Called before tensors are swapped with others: sessions of models with these tensors drop their plans. The next step plans anew."""
    for session in list(_live.sessions):
        model = session._source._model()
        if model is not None and session._native_if_made is not None and any(t is own for own in (*model.parameters(), *model.buffers()) for t in tensors):
            session._native_if_made = None


_planned_forwards: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _take_forward(model: torch.nn.Module, value: Any) -> Any:
    """The forward to set when other code assigns `value` to `model.forward`: for a wrapped model, a method that plans `value`. `value` may call the old
    forward."""
    session = _session(model)
    if session is None or not callable(value):
        return value
    function = getattr(value, "__func__", None)
    if function not in _planned_forwards or value.__self__ is not model:
        return _forward_of(model, session, value)
    session._set_forward(function, getattr(function, "__wrapped__", None))
    return value


def _forward_of(model: torch.nn.Module, session: Session, original: Any) -> types.MethodType:
    """Makes the method of `model` that plans `original`; None means the forward of its class."""
    function = _make_forward(type(model).forward if original is None else original, original)
    session._set_forward(function, original)
    return types.MethodType(function, model)


def _make_forward(shown: Any, original: Any) -> Any:
    """Makes the function that acts as `forward` of a wrapped model.

    shown: forward whose docstring and signature it takes.
    original: forward that it plans; None means the forward of the class.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = self.__dict__.get(SLOT)
        if session is None or session._forward is not forward:  # called by the forward that has replaced it
            return (types.MethodType(type(self).forward, self) if original is None else original)(*args, **kwargs)
        if "torch._dynamo.eval_frame" in sys.modules:
            return _untraced_call()(session, self, args, kwargs)
        return session._call(self, args, kwargs)

    forward.__doc__ = shown.__doc__
    forward.__module__ = getattr(shown, "__module__", forward.__module__)
    try:
        signature = inspect.signature(shown)
    except (TypeError, ValueError):
        pass
    else:
        if original is not None:
            signature = signature.replace(parameters=[inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
                                                      *signature.parameters.values()])
        forward.__signature__ = signature  # type: ignore[attr-defined]
    forward._torchdynamo_disable = True  # type: ignore[attr-defined]
    if original is not None:
        forward.__wrapped__ = original  # type: ignore[attr-defined]
    _planned_forwards.add(forward)
    return forward


@functools.cache
def _untraced_call() -> Any:
    """`Session._call`, hidden from the tracer of torch.compile."""
    return torch.compiler.disable(Session._call)
