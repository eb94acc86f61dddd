# SPDX-License-Identifier: Apache-2.0
"""`wrap` and its counterparts: what is put into a model, and taken out again."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
import weakref
from typing import Any, Literal, Mapping, TypeVar

import torch

from . import _live, _patches, _torch
from ._errors import Error, Refused
from ._groups import Offload, Planner, flattened
from ._options import arguments
from ._session import SLOT, Session
from ._states import state_bytes
from ._wrap_options import Options

M = TypeVar("M", bound=torch.nn.Module)


def wrap(model: M, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *, budget: int | float | str | None = None,
         offload: Literal["none", "activations", "optimizer", "all", "auto"] | Offload = "none", disk: Any = None,
         host_budget: int | float | str | None = None, optimizer: torch.optim.Optimizer | int | float | str | None = None, cache: Any = True,
         on_refuse: Literal["raise", "warn"] = "warn", planner: Planner | None = None, **older: Any) -> M:
    """Lets `model` train inside a budget of bytes: outputs, gradients, buffers and generator stay those of the plain model, bit by bit.

    model: any module; it is changed in place and returned. Its class, `state_dict`, attributes and methods stay as they are.
    args, kwargs: of a training step, to plan at once; without them the first training call plans. The forward runs once on tensors without
        data, and attributes of modules and random generators are put back. What that cannot plan, the first training call decides.
    budget: bytes for everything the step needs, as a number or as text: 8e9, "8 GB", "6 GiB"; or "60%" of the activations of
        a step that recomputes nothing, beyond what is held anyway. Default: no limit.
    offload: "activations" also moves values to a disk and back where that is faster than computing them again, beside the computations;
        "optimizer" keeps states there, of `remat.optimizer(..., model=model)`; "all" does both, and puts weights and gradients into
        files that the system may take out of memory (they count for no budget). "auto" is "none" without a disk, "activations"
        if weights, gradients and two states of each parameter take at most half of `host_budget`, or else "all". `remat.Offload` says more.
    disk: folder for that, on a fast disk. Space is taken when a plan is made, in files without a name that go with the process.
    host_budget: most bytes of the host's memory that any budget comes to, weights and gradients in memory included, as a number or as
        text; default, if something is offloaded: what the model takes now, and 0.8 of what is free then or left by a memory cgroup.
        Of a model on a CUDA device: bytes of page-locked memory that activations may go to, in place of a disk.
    optimizer: of the model, or the bytes of its states: the budget counts them from the first step on. Default: they are not counted.
    cache: keeps plans on disk, in the usual place or in that folder; False keeps none. Measured times of operators are kept anyway.
    on_refuse: "warn" runs steps that cannot be planned as they are, and names the cause once; "raise" raises Refused before any number is
        produced.
    planner: how plans are made and checked.
    device: the same as that of `remat.Offload`: `remat.wrap(model, device="cuda", offload="all", ...)`.
    Other options of `remat.Planner` and `remat.Offload` may still be given one by one; that goes with version 0.4.

    Without grad mode the model runs as it is. A wrapped model that is wrapped again takes over the new options.
    Raises OverBudget if no schedule fits, Refused if the model cannot be captured, NoSpace if weights or gradients do not fit on the disk, Error or
    ValueError for options; a step raises CopyFailed if a disk fails.
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
        raise Refused(_NO_REPLICAS)
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise Refused("DistributedDataParallel averages gradients as they come, which is no part of a plan: wrap the module inside",
                      advice="DistributedDataParallel(remat.wrap(module))")
    if type(model).__module__.startswith("torch._dynamo"):
        raise Refused("remat.wrap takes the module itself, not what torch.compile made of it",
                      advice="wrap the module, then compile it")
    options = options.on_host(model)
    session = model.__dict__.get(SLOT)
    if session is not None:
        session._set_options(options)
    else:
        _live.let_go_dropped()
        session = Session(model, options)
        _patches.install(_let_go, _take_forward)
        session._run  # says at once what is wrong with an option
        model.__dict__[SLOT] = session
        model.__dict__["forward"] = _forward_of(model, session, model.__dict__.get("forward"))
        for name, function in _OWN.items():
            model.__dict__[name] = types.MethodType(function, model)
    if args or kwargs:
        session._prepare(model, args, kwargs)
    return model


def _accelerator(device: str | torch.device) -> torch.device:
    """Raises ValueError or TypeError unless it is one that steps can run on."""
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
    """Takes out what `wrap` put into `model`, and returns it. A model that is not wrapped stays as it is."""
    session = _session(model)
    if session is None:
        return model
    session.close()
    session._place_weights(model)
    forward = model.__dict__.get("forward")
    if getattr(forward, "__func__", None) in _made:
        if session._original is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = session._original
        del model.__dict__[SLOT]
    else:
        return model  # somebody has wrapped our forward in turn: it stays, and runs the model as it is
    for name in _OWN:
        model.__dict__.pop(name, None)
    return model


def is_wrapped(model: torch.nn.Module) -> bool:
    """Does `model` train by plans?"""
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


def _let_go(*tensors: torch.Tensor) -> None:
    """No session holds the tensors of a model that has these: they are about to change places with others. The next step plans anew."""
    for session in list(_live.sessions):
        model = session._source._model()
        if model is not None and session._made is not None and any(t is own for own in (*model.parameters(), *model.buffers()) for t in tensors):
            session._made = None


_NO_REPLICAS = ("nn.DataParallel copies a wrapped model into threads, whose plans would share one memory; start one process per device "
                "with torchrun and DistributedDataParallel")


def _replicate_for_data_parallel(self: torch.nn.Module) -> Any:
    raise Refused(_NO_REPLICAS, advice="torchrun")


def _getstate(self: Any) -> Any:
    """What a pickle or a shallow copy takes over: the plain model. `copy.deepcopy` makes a wrapped copy."""
    cls: Any = type(self)
    state = cls.__getstate__(self) if hasattr(cls, "__getstate__") else dict(self.__dict__)
    if not isinstance(state, dict) or sys._getframe(1).f_code is copy.deepcopy.__code__:
        return state
    state = {name: value for name, value in state.items() if name not in (SLOT, "forward", *_OWN)}
    if self.__dict__[SLOT]._original is not None:
        state["forward"] = self.__dict__[SLOT]._original
    return state


_OWN = {"_replicate_for_data_parallel": _replicate_for_data_parallel, "__getstate__": _getstate}  #: methods of a wrapped model, beside `forward`

_made: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _take_forward(model: torch.nn.Module, value: Any) -> Any:
    """What becomes `forward` of a model that somebody gives another one: of a wrapped model, what plans that. It may call the one before."""
    session = _session(model)
    if session is None or not callable(value):
        return value
    function = getattr(value, "__func__", None)
    if function not in _made or value.__self__ is not model:
        return _forward_of(model, session, value)
    session._set_forward(function, getattr(function, "__wrapped__", None))
    return value


def _forward_of(model: torch.nn.Module, session: Session, original: Any) -> types.MethodType:
    """The method of `model` that plans `original`; None is the forward of its class."""
    function = _make_forward(type(model).forward if original is None else original, original)
    session._set_forward(function, original)
    return types.MethodType(function, model)


def _make_forward(shown: Any, original: Any) -> Any:
    """A function that acts as `forward` of a wrapped model. original: what it plans; None for that of the class."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = self.__dict__.get(SLOT)
        if session is None or session._forward is not forward:  # called by what came in its place
            return (types.MethodType(type(self).forward, self) if original is None else original)(*args, **kwargs)
        if "torch._dynamo.eval_frame" in sys.modules:
            return _undynamic()(session, self, args, kwargs)
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
    _made.add(forward)
    return forward


@functools.cache
def _undynamic() -> Any:
    """The call of a session, out of reach of the tracer of torch.compile."""
    return torch.compiler.disable(Session._call)
