# SPDX-License-Identifier: Apache-2.0
"""`wrap` and its counterparts: what is put into a model, and taken out again."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from typing import Any, Literal, Mapping, TypeVar

import torch

from . import _patches, _torch
from ._errors import Refused
from ._options import arguments
from ._session import SLOT, Options, Session
from ._states import state_bytes

M = TypeVar("M", bound=torch.nn.Module)


def wrap(model: M, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *, budget: int | float | str | None = None,
         activation_budget: int | float | str | None = None, solver: str = "auto", time_limit: float = 20.0, gap: float = 0.005,
         seed: int = 0, verify: int = 0, on_new_shape: Literal["nearest", "plan", "plain", "error"] = "nearest",
         on_refuse: Literal["raise", "warn"] = "warn", follow: bool | None = None, cache: Any = True,
         offload: Literal["none", "activations", "optimizer", "all", "auto"] = "none",
         weights: Literal["paged", "planned"] = "paged", host_budget: int | float | str | None = None, disk: Any = None,
         disk_budget: int | str | None = None, graph: bool = False, device: str | torch.device | None = None,
         optimizer: torch.optim.Optimizer | int | float | str | None = None) -> M:
    """Lets `model` train inside a budget of bytes: outputs, gradients, buffers and generator stay those of the plain model, bit by bit.

    model: any module; it is changed in place and returned. Its class, `state_dict`, attributes and methods stay as they are.
    args, kwargs: of a training step, to plan at once; without them the first training call plans.
    budget: bytes for everything the step needs, as a number or as text: 8e9, "8 GB", "6 GiB"; or "60%" of the activations of
        a step that recomputes nothing, beyond what is held anyway. Default: no limit.
    activation_budget: the same for activations, outputs and new gradients only; what is held before the step comes on top.
    solver: see `solvers()`. time_limit: of a search, seconds. gap: relative distance to the bound that will do. seed: of the search.
    verify: so many steps also run plain, twice, and are compared bit by bit; the first difference raises NotEqual. A tensor that differs between
        two plain runs is not compared: a warning in the log `remat` names it, and the operators that give other bits each time.
    on_new_shape: what a call with other shapes does: "nearest" takes over the decisions of a plan for another shape where it can,
        "plan" plans anew, "plain" runs the model as it is, "error" raises Refused.
    on_refuse: "warn" runs steps that cannot be planned as they are, and names the cause once; "raise" raises Refused before any number is
        produced.
    follow: True runs the model's own Python in every step, on tensors without data, and compares its calls of operators with the recorded ones.
        State that it reads or changes, hooks and exceptions are then those of eager mode. Where a step takes another path, it is recorded from
        there on, and planned at once. False replays the recorded forward: for forwards that are pure functions of their arguments. Default:
        True, but False where `device` says where steps run.
    offload: "activations" also moves values to a disk and back where that is faster than computing them again, beside the computations;
        "optimizer" keeps states there, of `remat.optimizer(..., model=model)`; "all" does both, and puts weights and gradients into
        files that the system may take out of memory (they count for no budget). "auto" is "none" without a disk, "activations"
        if weights, gradients and two states of each parameter take at most half of `host_budget`, or else "all".
    weights: those in files: "paged" leaves to the system what of them is in memory; "planned" has steps fetch what they read before it is
        used, beside the computations, drop it, and fetch it again, within the budget, which counts them then.
    host_budget: most bytes of the host's memory that any budget comes to, weights and gradients in memory included, as a number or as
        text; default, if something is offloaded: what the model takes now, and 0.8 of what is free then or left by a memory cgroup.
        Of a model on a CUDA device: bytes of page-locked memory that activations may go to, in place of a disk.
    disk: folder for that, on a fast disk. Space is taken when a plan is made, in files without a name that go with the process.
    disk_budget: bytes that each of activations, weights, gradients and states may take there, as a number or as text; default: what is free.
    device: with offload="all": where steps run while weights and gradients are in page-locked memory of the host, as OffMate does. Steps fetch
        weights before they are used and drop them; gradients leave as soon as they are complete. The plan covers these copies, those of
        activations and what is recomputed. `remat.optimizer` chooses where its arithmetic is done. Buffers are on the device; inputs may be on the host. Default: where
        the model is. `host_budget` is for weights, gradients and activations then. `disk` gets states; activations unless `host_budget` leaves
        as much for them as the weights take; and weights if these and the gradients take more than `host_budget`.
    graph: captures the kernels of each plan as CUDA graphs (of any accelerator that has them) in its second step, and replays them from then on,
        with recomputations, copies and random numbers. Several input shapes share one arena. Inputs are copied into it, which the budget counts. A plan
        that cannot be captured warns once, names the operator and the cause, and launches its kernels one by one. On the host it raises Refused.
    optimizer: of the model, or the bytes of its states: the budget counts them from the first step on. Default: they are not counted.
    cache: keeps plans on disk, in the usual place or in that folder; False keeps nothing.

    Without grad mode the model runs as it is. A wrapped model that is wrapped again takes over the new options.
    Raises OverBudget if no schedule fits, Refused if the model cannot be captured, NoSpace if weights or gradients do not fit on the disk, Error or
    ValueError for options; a step raises CopyFailed if a disk fails.
    """
    if isinstance(optimizer, torch.optim.Optimizer) and isinstance(model, torch.nn.Module):
        optimizer = state_bytes(optimizer, model)
    options = Options(budget, activation_budget, solver, time_limit, gap, seed, verify, on_new_shape, on_refuse, follow, cache, offload,
                      weights, host_budget, disk, disk_budget, graph, optimizer, None if device is None else _accelerator(device)).check()
    args = arguments(args)
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
        original = model.__dict__.get("forward")
        session = Session(model, original, options)
        _patches.install()
        session._run  # says at once what is wrong with an option
        model.__dict__[SLOT] = session
        model.__dict__["forward"] = types.MethodType(_make_forward(original or type(model).forward, original is not None), model)
        for name, function in _OWN.items():
            model.__dict__[name] = types.MethodType(function, model)
    if args or kwargs:
        session._prepare(model, args, kwargs)
    return model


def _accelerator(device: str | torch.device) -> torch.device:
    """Raises ValueError unless it is one that steps can run on."""
    found = torch.device(device)
    if found.type in ("cpu", "meta"):
        raise ValueError(f"device must be an accelerator, got {str(found)!r}")
    _torch.check_device(str(found))
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
    from ._core import Error

    session = _session(model)
    if session is None:
        raise Error(f"this {type(model).__qualname__} is not wrapped: call remat.wrap first")
    return session


def _session(model: Any) -> Session | None:
    return getattr(model, "__dict__", {}).get(SLOT)


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

import weakref  # noqa: E402

_made: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _make_forward(original: Any, bound: bool) -> Any:
    """A function that acts as `forward` of a wrapped model."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = self.__dict__[SLOT]
        if "torch._dynamo.eval_frame" in sys.modules:
            return _undynamic()(session, self, args, kwargs)
        return session._call(self, args, kwargs)

    forward.__doc__ = original.__doc__
    forward.__module__ = getattr(original, "__module__", forward.__module__)
    try:
        signature = inspect.signature(original)
    except (TypeError, ValueError):
        pass
    else:
        if bound:
            signature = signature.replace(parameters=[inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
                                                      *signature.parameters.values()])
        forward.__signature__ = signature  # type: ignore[attr-defined]
    forward._torchdynamo_disable = True  # type: ignore[attr-defined]
    _made.add(forward)
    return forward


@functools.cache
def _undynamic() -> Any:
    """The call of a session, out of reach of the tracer of torch.compile."""
    return torch.compiler.disable(Session._call)
