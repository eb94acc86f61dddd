# SPDX-License-Identifier: Apache-2.0
"""The options of `wrap`: their checks, and their resolution for a model."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Literal

import torch

from . import _core, _options, _torch, _weights
from ._groups import Planner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Planner):
    """The options given to `wrap`."""

    solver_options: Any = ()  # a mapping; pairs of texts after `check`
    budget: int | float | str | None = None
    on_refuse: Literal["raise", "warn"] = "warn"
    cache: Any = True
    offload: Literal["none", "activations", "optimizer", "all", "auto"] = "none"
    weights: Literal["paged", "planned"] = "paged"
    host_budget: int | float | str | None = None
    disk: Any = None
    disk_budget: Any = None
    optimizer: int | float | str | None = None  # bytes of the states of the optimizer
    steps_on: Any = None  # device of the steps of a model with weights on the host
    device: Any = None  # rates of a roofline, as `parts_of` returns them
    max_budget: int = dataclasses.field(default=-1, compare=False)  # upper limit of every budget, bytes, see `resolved_for`; -1: no limit
    was_auto: bool = dataclasses.field(default=False, compare=False)  # offload was "auto" before `resolved_for` resolved it
    far_bytes: int = dataclasses.field(default=-1, compare=False)  # bytes of host memory for activations of an accelerator; -1: no such memory
    weights_in_files: bool = dataclasses.field(default=False, compare=False)  # weights are in files of the disk

    def check(self) -> Options:
        """The checked options, with sizes as text and folders as absolute paths. Raises Error, ValueError or TypeError naming an invalid option."""
        if self.budget is not None and self.activation_budget is not None:
            raise ValueError("give budget or activation_budget, not both")
        if str(self.on_refuse) == "error":  # the name of "raise" in older releases
            return dataclasses.replace(self, on_refuse="raise").check()
        for name, allowed in (("on_new_shape", ("nearest", "plan", "plain", "error")), ("on_refuse", ("raise", "warn")),
                              ("offload", ("none", "activations", "optimizer", "all", "auto")), ("weights", ("paged", "planned"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not isinstance(self.solver, str):
            raise TypeError(f"solver must be a name, got {self.solver!r}")
        solver_options = self.solver_options
        if not (isinstance(solver_options, tuple) and all(isinstance(pair, tuple) for pair in solver_options)):  # not checked yet
            options = _options.of_solver(solver_options)
            _core.check_solver(self.solver_name(), options)
            solver_options = tuple(options.items())
        for name, kinds in (("graph", bool), ("follow", (bool, type(None)))):
            if not isinstance(getattr(self, name), kinds):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("time_limit", "first_limit", "gap"):
            _options.number(name, getattr(self, name))
        for name in ("seed", "verify"):
            _options.number(name, getattr(self, name), numbers.Integral, maximum=(1 << 64) - 1)
        checked: dict[str, Any] = {"solver_options": solver_options}
        for name, parse in (("budget", lambda text: _torch.check_budget(text, False)), ("activation_budget", lambda text: _torch.check_budget(text, True)),
                            ("host_budget", _core.parse_bytes), ("disk_budget", _core.parse_bytes), ("optimizer", _core.parse_bytes)):
            if getattr(self, name) is not None:
                checked[name] = _options.size(name, getattr(self, name), parse)
        if self.host_budget is not None and _core.parse_bytes(checked["host_budget"]) > (host_limit := _torch.host_limit()):
            raise ValueError(f"host_budget={self.host_budget!r} is more than the {host_limit} bytes that this process can take at most")
        if self.offload == "none" and (self.disk is not None or self.disk_budget is not None):
            raise ValueError('disk and disk_budget are for offload="activations", "optimizer", "all" or "auto"')
        if self.weights == "planned" and self.offload not in ("all", "auto"):
            raise ValueError(f'weights="planned" is for offload="all" or "auto", got offload="{self.offload}"')
        for name in ("disk", "cache"):
            if (value := getattr(self, name)) is not None and not (name == "cache" and isinstance(value, bool)):
                checked[name] = _options.folder(name, value)
        if "disk" in checked:
            _torch.check_disk(checked["disk"], checked.get("disk_budget", ""))
        return dataclasses.replace(self, **checked)

    def solver_name(self) -> str:
        return "automatic" if self.solver == "auto" else self.solver

    def follows(self) -> bool:
        """True if the model's own code runs in every step."""
        return self.follow is not False and self.device is None

    def optimizer_bytes(self) -> int:
        return 0 if self.optimizer is None else _core.parse_bytes(str(self.optimizer))

    def host_bytes(self) -> int:
        return _core.parse_bytes(str(self.host_budget))

    def resolved_for(self, model: torch.nn.Module) -> Options:
        """The options resolved for a model: with the limit of the host, and "auto" replaced by its choice. Activations of an accelerator may go to the host.

        Raises ValueError if offload needs a disk and there is none.
        """
        there: Any = next((p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")), None)
        accelerator = there is not None
        if self.steps_on is not None or (accelerator and self.offload == "all"):
            return self._resolved_for_device(model, there if self.steps_on is None else self.steps_on)
        if self.disk is None and self.offload not in ("none", "auto") and not (accelerator and self.offload == "activations"):
            raise ValueError(f'offload="{self.offload}" needs disk, a folder: what leaves the memory of the host goes to a disk')
        if self.offload == "none" and self.host_budget is None:
            return self
        free = _torch.host_free() * 4 // 5
        if accelerator:  # budgets then limit its memory, and not that of the host
            far_bytes = -1 if self.disk is not None or self.offload == "none" else free if self.host_budget is None else self.host_bytes()
            return dataclasses.replace(self, offload="activations" if self.offload == "auto" else self.offload, was_auto=self.offload == "auto", far_bytes=far_bytes)
        held = sum(storage.nbytes() for storage, _ in _weights.storages(model) if storage.device.type == "cpu")
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        host_limit = held + free if self.host_budget is None else self.host_bytes()
        offload = self.offload
        if offload == "auto":
            offload = "none" if self.disk is None else "activations" if held + 3 * trained <= host_limit // 2 else "all"
        return dataclasses.replace(self, offload=offload, was_auto=self.offload == "auto", max_budget=host_limit)

    def _resolved_for_device(self, model: torch.nn.Module, device: torch.device) -> Options:
        """The options resolved for steps on `device` with weights on the host."""
        if self.offload != "all":
            raise ValueError(f'device is where steps of a model run whose weights are on the host: it needs offload="all", got "{self.offload}"')
        for name in ("graph", "verify"):
            if getattr(self, name):
                raise ValueError(f"{name} needs weights that stay on the device")
        weights = sum(storage.nbytes() for storage, _ in _weights.storages(model))
        gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        host_limit = self.host_bytes() if self.host_budget is not None else weights + _torch.host_free() * 4 // 5
        if self.disk is None:
            if host_limit < weights:
                raise ValueError(f"host_budget={self.host_budget!r} is less than the {weights} bytes of the weights; with disk, they may be in files")
            return dataclasses.replace(self, steps_on=device, far_bytes=host_limit - weights)
        if host_limit < gradients:
            raise ValueError(f"host_budget={self.host_budget!r} is less than the {gradients} bytes of the gradients, which stay in memory of the host")
        weights_in_files = host_limit < weights + gradients
        room = -1 if weights_in_files or host_limit - weights - gradients < weights else host_limit - weights
        return dataclasses.replace(self, steps_on=device, far_bytes=room, weights_in_files=weights_in_files)

    def activation_disk(self) -> tuple[str | None, str]:
        """The folder for activations, None for none, and the largest number of bytes there as text, empty for no limit."""
        spills = self.offload in ("activations", "all") and (self.steps_on is None or self.far_bytes < 0)
        return self.disk if spills else None, self.disk_budget or ""

    def cache_folder(self) -> str | None:
        """The folder of the cache of plans: None for the usual place, empty for no cache."""
        return None if self.cache is True else self.cache or ""

    def budget_text(self) -> tuple[str, bool]:
        """The budget as text, empty for none, and whether it is for activations only."""
        return str(self.budget or self.activation_budget or ""), self.activation_budget is not None
