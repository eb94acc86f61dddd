# SPDX-License-Identifier: Apache-2.0
"""Plans and curves of a model that is not wrapped: the time that a budget would cost."""

from __future__ import annotations

import dataclasses
import math
import numbers
import pathlib
from typing import TYPE_CHECKING, Any, Mapping

import torch

from . import _core, _options
from ._errors import Refused
from ._model_entries import SLOT
from ._report import MOST_POINTS, Plan, extra_time
from ._session import Session
from ._wrap_options import Options

if TYPE_CHECKING:
    from ._cards import Card


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A model of a device by its peaks, to plan without the device. An operation takes the time of its arithmetic or of its bytes, whichever is longer."""

    flops_per_second: float | Mapping[torch.dtype, float]  #: one rate for all types, or a rate per type; other types have the smallest of these
    bytes_per_second: float
    overhead: float = 0.0  #: seconds per operation

    def __post_init__(self) -> None:
        rates = self.flops_per_second.values() if isinstance(self.flops_per_second, Mapping) else [self.flops_per_second]
        for x in (*rates, self.bytes_per_second, self.overhead):
            if not isinstance(x, numbers.Real):
                raise TypeError(f"flops_per_second, bytes_per_second and overhead of a Roofline must be numbers, got {x!r}")
        if not rates or not all(math.isfinite(x) and x > 0 for x in (*rates, self.bytes_per_second)):
            raise ValueError("flops_per_second and bytes_per_second of a Roofline must be finite and > 0")
        if not (math.isfinite(self.overhead) and self.overhead >= 0):
            raise ValueError(f"overhead of a Roofline must be finite and >= 0, got {self.overhead}")


def plan(model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *, budget: int | float | str | None = None,
         activation_budget: int | float | str | None = None, solver: str = "auto", solver_options: Mapping[str, int | float | bool] = {},
         time_limit: float = 20.0, gap: float = 0.005, seed: int = 0, device: str | Card | Roofline | None = None) -> Plan:
    """Plans a training step of `model` within a budget: peak and time. The model is captured, not trained, and stays unchanged.

    args, kwargs: arguments of a training step.
    budget: see `wrap`.
    activation_budget, solver, solver_options, time_limit, gap, seed: see `Planner`.
    device: a name of `cards()`, a `Card` or a `Roofline`, whose rates give the times; model and arguments may then be on `meta`, without
        any data. Default: kernels are measured.
    Raises OverBudget if no schedule fits, Refused if the model cannot be captured, Error or ValueError for options.
    """
    options = Options(budget=budget, activation_budget=activation_budget, solver=solver, solver_options=solver_options, time_limit=time_limit, first_limit=time_limit,
                      gap=gap, seed=seed, device=parts_of(device))
    session = prepared(model, options)
    session._prepare(model, args, kwargs)
    return session.plan


@dataclasses.dataclass(frozen=True)
class Curve:
    """The time of a step against its budget."""

    points: list[dict[str, Any]]  #: by falling budget: budget and peak (bytes), seconds, bound (proven lower bound, seconds), status
    plain_seconds: float  #: time of the step without recomputation
    picture: str  #: the curve as an SVG document

    def svg(self, path: str | pathlib.Path | None = None) -> str:
        """The curve as an SVG document; also written to `path` if given."""
        if path is not None:
            pathlib.Path(path).write_text(self.picture)
        return self.picture

    def __str__(self) -> str:
        """The curve, drawn with characters."""
        points = [(p["budget"], -1 if p["peak"] is None else p["peak"], p["seconds"] or 0.0, p["bound"]) for p in self.points]
        return _core.curve_text(points, self.plain_seconds, "extra time").rstrip("\n")

    def _repr_svg_(self) -> str:
        return self.picture

    def plot(self, axes: Any = None) -> Any:
        """Draws extra time in percent over budgets in bytes with matplotlib; returns the axes."""
        if axes is None:
            import matplotlib.pyplot

            axes = matplotlib.pyplot.subplots()[1]
        found = sorted((p["peak"], 100 * extra_time(p["seconds"], self.plain_seconds)) for p in self.points if p["seconds"] is not None)
        axes.step([x for x, _ in found], [y for _, y in found], where="post")
        axes.set_xlabel("budget [bytes]")
        axes.set_ylabel("extra time [%]")
        return axes


def curve(model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *, points: int = 20, solver: str = "auto",
          solver_options: Mapping[str, int | float | bool] = {}, time_limit: float = 60.0, gap: float = 0.005, seed: int = 0,
          device: str | Card | Roofline | None = None) -> Curve:
    """Plans a training step for several budgets. The model is captured, not trained, and stays unchanged.

    args, kwargs, device: as for `plan`.
    points: number of budgets.
    solver, solver_options, gap, seed: see `Planner`.
    time_limit: time limit of all searches together, seconds.
    Raises Refused if the model cannot be captured, Error or ValueError for options.
    """
    _options.number("points", points, numbers.Integral, 1, MOST_POINTS)
    options = Options(solver=solver, solver_options=solver_options, time_limit=time_limit, gap=gap, seed=seed, device=parts_of(device))
    session = prepared(model, options)
    session._native.end_when_interrupted()
    session._prepare(model, args, kwargs)
    found, picture = session._native.curve(session._options.solver_name(), dict(session._options.solver_options), time_limit, gap, seed, points)
    return Curve(found, session.plan["plain_seconds"], picture)


def parts_of(device: str | Card | Roofline | None) -> tuple[Any, ...] | None:
    """Converts the rates of a device for `_torch.Session`; None: kernels are measured. Raises ValueError or TypeError."""
    from ._cards import Card, card

    known = card(device) if isinstance(device, str) else device
    rated = known.roofline if isinstance(known, Card) else known
    if rated is None:
        return None
    if not isinstance(rated, Roofline):
        raise TypeError(f"device must be a name such as 'h100-sxm', a remat.Card or a remat.Roofline, got {device!r}")
    rates = rated.flops_per_second
    by_type = dict(rates) if isinstance(rates, Mapping) else {}
    return list(by_type.items()), min(by_type.values(), default=rates), rated.bytes_per_second, rated.overhead


def check_model(model: Any) -> None:
    """Raises TypeError unless `model` is a `torch.nn.Module`."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__qualname__}")


def prepared(model: torch.nn.Module, options: Options) -> Session:
    """A session for a model that is not changed. Raises Refused if the model is on meta and `options` has no device; TypeError for no model."""
    check_model(model)
    if options.device is None and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise Refused("the model is on meta, where nothing can be measured", advice="device=remat.Roofline(...) tells what operations take")
    wrapped = model.__dict__.get(SLOT)
    original = model.__dict__.get("forward") if wrapped is None else wrapped._original
    return Session(model, dataclasses.replace(options, on_refuse="raise").check(), original)
