# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of PyTorch's optimizers for a few parameters at a time: choice of kernel, choice of device, and the call itself."""

from __future__ import annotations

import math
import sys
import time
import types
from typing import TYPE_CHECKING, Any, Callable, cast

import torch

from ._errors import Refused

if TYPE_CHECKING:
    from ._optimizer import _Offloaded

FUSED = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad})  # optimizers with a fused kernel for the host
_FOR_COMPILER, _WITHOUT_GRAD = (decorate and decorate(lambda: None).__code__ for decorate in (
    getattr(torch, "_disable_dynamo", None), getattr(sys.modules[torch.optim.Optimizer.__module__], "_use_grad_for_differentiable", None)))


def step_alone(optimizer: _Offloaded, group: dict[str, Any], params: list[torch.Tensor], **instead: Any) -> None:
    """Steps `params` by the class that `optimizer` is derived from, as if the group had no other parameters.

    instead: attributes that replace those of `optimizer`, such as `state`.
    Raises Refused for a class that keeps data from parameter to parameter.
    """
    plain = optimizer._plain
    part = {**group, "params": params}
    if plain is torch.optim.Adafactor and part["eps"][0] is None:  # Adafactor takes the type of the first parameter with a gradient for the whole group
        first = next((p for p in group["params"] if (p.grad is not None if optimizer._overlap is None else p.requires_grad)), params[0])
        part["eps"] = torch.finfo(first.dtype).eps, part["eps"][1]
    if cast(torch.Tensor, params[0].grad).is_sparse and part.get("fused"):
        part["fused"] = False  # fused kernels do not support sparse gradients
    inner = plain.__new__(plain)
    vars(inner).update(vars(optimizer), param_groups=[part], **instead)
    given, members_before = dict(part), dict(vars(inner))
    step = plain.step
    bare(cast(Any, step).__wrapped__ if getattr(step, "hooked", False) else step)(inner)  # without the hooks of `step`: they are for the step of all parameters
    for what, was, now in (("its param_groups", given, part), ("itself", members_before, vars(inner))):
        for key, value in now.items():
            if key not in was or was[key] is not value:
                if type(value) is not bool:
                    raise Refused(f"{plain.__name__} keeps {key!r} in {what} from parameter to parameter",
                                  advice="use the class as it is: it cannot step parameter by parameter")
                if now is part:
                    group[key] = value
                else:
                    vars(optimizer)[key] = value


def bare(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f` without the wrapper of PyTorch's compiler, whose first call would load the whole compiler: 80 MB.

    If the compiler is loaded already, returns `f` unchanged.
    """
    code = getattr(f, "__code__", None)
    if code is None or code not in (_FOR_COMPILER, _WITHOUT_GRAD) or "torch._dynamo" in sys.modules:
        return f
    wrapped: Any = f
    plain = types.MethodType(wrapped.__wrapped__, wrapped.__self__) if hasattr(f, "__self__") else wrapped.__wrapped__
    return torch.no_grad()(plain) if code is _WITHOUT_GRAD else plain


def may_fuse(params: list[Any], options: dict[str, Any]) -> bool:
    """True if the user has not chosen a kernel, and the fused kernel supports these parameters."""
    groups = [g for g in params if isinstance(g, dict)]
    if any(key in given for given in (options, *groups) for key in ("fused", "foreach")) or options.get("differentiable") or options.get("capturable"):
        return False
    if any(isinstance(v, torch.Tensor) for given in (options, *groups) for k, v in given.items() if k != "params"):
        return False
    return all(isinstance(p, torch.Tensor) and p.is_floating_point() and p.device.type == "cpu" for p in members(params))


def members(params: list[Any]) -> list[Any]:
    """The parameters in the argument `params` of an optimizer: tensors, named tensors, or groups."""
    groups = [g for g in params if isinstance(g, dict)]
    found = [p for g in groups for p in ([g["params"]] if isinstance(g["params"], torch.Tensor) else g["params"])] if groups else params
    return [p[1] if isinstance(p, tuple) else p for p in found]


def faster(make: Callable[[torch.device | None], Any], device: torch.device, params: list[Any], args: tuple[Any, ...], options: dict[str, Any],
           most: int) -> torch.device | None:
    """Tells where a step is faster: on `device`, copies there and back included, or on the host (None). Measures a step on both.

    make: returns the class whose arithmetic runs at a place.
    most: largest size of the trial parameter with its gradient, bytes.
    """
    like = max(members(params), key=lambda p: p.numel(), default=None)
    if like is None:
        return None
    count = min(like.numel(), most // (2 * like.element_size()))
    group = params[0] if isinstance(params[0], dict) else {}  # a group may have options that `options` lacks
    times: dict[Any, float] = {}
    for place in (None, device):
        p = torch.zeros(count, dtype=like.dtype, pin_memory=True).requires_grad_()
        p.grad = torch.zeros(count, dtype=like.dtype, pin_memory=True)
        stepper = make(place)([{**group, "params": [p]}], *args, **options)
        for k in range(3):
            begin = time.perf_counter()
            stepper.step()
            if k > 0:  # the first step also makes the states
                times[place] = min(times.get(place, math.inf), time.perf_counter() - begin)
    fastest: torch.device | None = min(times, key=times.__getitem__)
    return fastest
