# SPDX-License-Identifier: Apache-2.0
"""Memory and rates of devices, which need not be present."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from typing import Any

import torch

from . import _options, _torch
from ._plan import Roofline


@dataclasses.dataclass(frozen=True)
class Card:
    """A device to plan for.

    >>> remat.card("h100-sxm").memory
    85520809984
    """

    name: str
    memory: int  #: bytes that the driver reports
    reserved: int  #: bytes that context, kernels and libraries take in a process with PyTorch, outside every plan
    roofline: Roofline | None  #: rates; None: kernels are measured on the device itself
    source: str  #: origin of these numbers

    @property
    def available(self) -> int:
        """Bytes for training."""
        return self.memory - self.reserved


@functools.cache
def _published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(pathlib.Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))
    return found


def cards() -> list[str]:
    """Names of devices with published numbers, for the argument `device` of `fit` and `largest`."""
    return sorted(_published()["devices"])


def card(name: str) -> Card:
    """The published numbers of a device. Raises ValueError, which lists the known names, for an unknown name."""
    known = _published()["devices"]
    if name not in known:
        raise ValueError(f"device {name!r} is unknown; known are {', '.join(cards())}. For another one pass a remat.Card")
    entry = known[name]
    rates = dict(entry["flops_per_second"])
    reduced = rates.pop("tf32", None)
    if reduced is not None and torch.backends.cuda.matmul.fp32_precision == "tf32":
        rates["float32"] = reduced
    by_type = {getattr(torch, dtype): rate for dtype, rate in rates.items()}
    return Card(name, entry["memory"], _published()["reserved"], Roofline(by_type, entry["bytes_per_second"]), entry["source"])


def card_for(device: str | Card | Roofline | None, model: torch.nn.Module, inputs: list[torch.Tensor]) -> Card:
    """The card for the argument `device` of `fit`; None means the device at hand. Raises ValueError or TypeError."""
    if isinstance(device, Card):
        return device
    if isinstance(device, str):
        return card(device)
    tensors = (*model.parameters(), *model.buffers(), *inputs)
    at_hand = next((t.device for t in tensors if not t.is_meta), None)
    if at_hand is None:
        at_hand = (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or torch.device("cpu")
    if isinstance(device, Roofline):
        return Card("device with given rates", _memory(at_hand), 0, device, "given")
    if device is not None:
        raise TypeError(f"device must be a name such as 'h100-sxm', a remat.Card or a remat.Roofline, got {device!r}")
    on_meta = any(t.is_meta for t in tensors)  # the model cannot run, so its kernels cannot be measured
    return Card(str(at_hand), _memory(at_hand), 0, _measured(at_hand, model) if on_meta else None, "measured")


def _memory(device: torch.device) -> int:
    """Bytes that this process can use on a device."""
    if device.type == "cpu":
        return _torch.host_free()
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device)


def _measured(device: torch.device, model: torch.nn.Module) -> Roofline:
    """Measures the rates of matrix products in the types of the model, and of copies."""
    rates = {}
    for dtype in {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}:
        a = torch.ones(1024, 1024, dtype=dtype, device=device)
        rates[dtype] = 2 * 1024**3 / _seconds(lambda: a @ a, device)
    source = torch.ones(1 << 24, device=device)
    target = torch.empty_like(source)
    return Roofline(rates, 2 * source.nbytes / _seconds(lambda: target.copy_(source), device))


def _seconds(job: Any, device: torch.device) -> float:
    """The shortest time of five runs, seconds."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        job()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def optimizer_bytes(optimizer: Any, model: torch.nn.Module) -> int | str | None:
    """Bytes of the states of an optimizer.

    optimizer: an optimizer, its class, the name of a class of `torch.optim`, or the bytes themselves.
    Raises ValueError, TypeError or Error for anything else.
    """
    from ._states import state_bytes

    if isinstance(optimizer, str):
        classes: dict[str, Any] = {name.lower(): cls for name, cls in vars(torch.optim).items()
                   if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer}
        if optimizer.lower() in classes:
            optimizer = classes[optimizer.lower()]
        elif not any(c.isdigit() for c in optimizer):
            raise ValueError(f"optimizer {optimizer!r} is none of torch.optim: {', '.join(sorted(classes))}")
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters(), lr=1e-3)  # type: ignore[call-arg]  # all classes but the base take these arguments
    if isinstance(optimizer, torch.optim.Optimizer):
        return state_bytes(optimizer, model)
    return None if optimizer is None else _options.size("optimizer", optimizer)
