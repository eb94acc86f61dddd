# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of PyTorch's optimizers, for a few parameters at a time: which kernel does it, where it is done faster, how it is called."""

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

FUSED = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad})  # those with such a kernel for the host
_FOR_COMPILER, _WITHOUT_GRAD = (decorate and decorate(lambda: None).__code__ for decorate in (
    getattr(torch, "_disable_dynamo", None), getattr(sys.modules[torch.optim.Optimizer.__module__], "_use_grad_for_differentiable", None)))


def step_alone(optimizer: _Offloaded, group: dict[str, Any], params: list[torch.Tensor], **instead: Any) -> None:
    """The arithmetic: a step of the class that `optimizer` is derived from, as if there were no other parameters."""
    plain = optimizer._plain
    part = {**group, "params": params}
    if plain is torch.optim.Adafactor and part["eps"][0] is None:  # it takes the first type it comes to, for the whole group
        first = next((p for p in group["params"] if (p.grad is not None if optimizer._overlap is None else p.requires_grad)), params[0])
        part["eps"] = torch.finfo(first.dtype).eps, part["eps"][1]
    if cast(torch.Tensor, params[0].grad).is_sparse and part.get("fused"):
        part["fused"] = False  # those kernels cannot
    inner = plain.__new__(plain)
    vars(inner).update(vars(optimizer), param_groups=[part], **instead)
    given, told = dict(part), dict(vars(inner))
    step = plain.step
    bare(cast(Any, step).__wrapped__ if getattr(step, "hooked", False) else step)(inner)  # hooks of the step are for the whole of it
    for what, was, now in (("its param_groups", given, part), ("itself", told, vars(inner))):
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
    """The same without what PyTorch puts around it for its compiler, of which the first call would load all: 80 MB.

    With the compiler loaded it is left as it is.
    """
    code = getattr(f, "__code__", None)
    if code is None or code not in (_FOR_COMPILER, _WITHOUT_GRAD) or "torch._dynamo" in sys.modules:
        return f
    wrapped: Any = f
    plain = types.MethodType(wrapped.__wrapped__, wrapped.__self__) if hasattr(f, "__self__") else wrapped.__wrapped__
    return torch.no_grad()(plain) if code is _WITHOUT_GRAD else plain


def may_fuse(params: list[Any], args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Nobody has chosen a kernel, and the fused one can do these parameters."""
    groups = [g for g in params if isinstance(g, dict)]
    if any(key in told for told in (options, *groups) for key in ("fused", "foreach")) or options.get("differentiable") or options.get("capturable"):
        return False
    if any(isinstance(v, torch.Tensor) for told in (options, *groups) for k, v in told.items() if k != "params") or any(isinstance(a, torch.Tensor) for a in args):
        return False
    return all(isinstance(p, torch.Tensor) and p.is_floating_point() and p.device.type == "cpu" for p in members(params))


def members(params: list[Any]) -> list[Any]:
    """The parameters in what an optimizer is made of."""
    groups = [g for g in params if isinstance(g, dict)]
    found = [p for g in groups for p in ([g["params"]] if isinstance(g["params"], torch.Tensor) else g["params"])] if groups else params
    return [p[1] if isinstance(p, tuple) else p for p in found]


def faster(make: Callable[[torch.device | None], Any], device: torch.device, params: list[Any], args: tuple[Any, ...], options: dict[str, Any],
           most: int) -> torch.device | None:
    """Where a step is faster: on `device`, with the copies there and back, or on the host (None). Steps a parameter on both.

    make: gives the class whose arithmetic is done at a place.
    most: bytes of the parameter and its gradient.
    """
    like = max(members(params), key=lambda p: p.numel(), default=None)
    if like is None:
        return None
    count = min(like.numel(), most // (2 * like.element_size()))
    group = params[0] if isinstance(params[0], dict) else {}  # it may have options that `options` lacks
    times: dict[Any, float] = {}
    for place in (None, device):
        p = torch.zeros(count, dtype=like.dtype, pin_memory=True).requires_grad_()
        p.grad = torch.zeros(count, dtype=like.dtype, pin_memory=True)
        stepper = make(place)([{**group, "params": [p]}], *args, **options)
        for k in range(3):
            begin = time.perf_counter()
            stepper.step()
            if k > 0:  # the first makes states
                times[place] = min(times.get(place, math.inf), time.perf_counter() - begin)
    fastest: torch.device | None = min(times, key=times.__getitem__)
    return fastest
