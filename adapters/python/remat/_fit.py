# SPDX-License-Identifier: Apache-2.0
"""Will it fit? Answers without running the model."""

from __future__ import annotations

import dataclasses
import html
import json
import numbers
import os
from typing import Any, Callable, Iterable, Mapping

import torch

from . import _core, _options, _tree
from ._cards import Card, card_for, optimizer_bytes
from ._errors import OverBudget
from ._plan import Roofline, check_model, parts_of, prepared
from ._report import extra_time, write_whole
from ._session import Session
from ._wrap_options import Options

_EXTRAS = (0.05, 0.10, 0.20)  #: shares of extra time for which the table shows the smallest peak
_SHORT = 1.0  #: time limit of each search, seconds
_MOST = 1e6  #: largest value of `extra`, as a share
_KERNELS = 4096  #: bytes that measured kernels may take beyond their estimate


@dataclasses.dataclass(frozen=True)
class FitPoint:
    """Peak and time of a plan."""

    name: str
    peak: int  #: bytes on the device, held values included
    extra: float  #: predicted extra time, as a share of the step without recomputation
    recomputed: int  #: number of recomputations


@dataclasses.dataclass(frozen=True)
class Fit:
    """Memory and time of training on a device; `print` shows a table. All sizes are bytes."""

    model: str
    device: str
    memory: int  #: memory of the device
    reserved: int  #: part of the memory that context and libraries take
    budget: int  #: bytes for training: as asked for, else `memory` less `reserved`
    sizes: dict[str, int]  #: parameters, gradients, optimizer, buffers, inputs, and the largest workspace of a kernel
    eager_peak: int  #: peak of the step without remat
    smallest: int  #: smallest budget for which a plan is known
    smallest_bound: int  #: lower bound on every budget with a plan
    points: tuple[FitPoint, ...]  #: plans by rising extra time
    chosen: FitPoint | None  #: plan for `budget`; None: no plan fits
    allowed: float  #: extra time that recomputation may cost, as a share
    seconds: float  #: predicted time of the step without recomputation

    @property
    def fits(self) -> bool:
        """True if training fits into the budget, at no more than the allowed extra time."""
        return self.chosen is not None and self.chosen.extra <= self.allowed

    @property
    def verdict(self) -> str:
        """The answer as a sentence."""
        where = f"{_core.format_bytes(self.budget)} on {self.device}"
        if self.eager_peak <= self.budget and self.fits:
            return f"The plain step fits into {where}."
        if self.chosen is None:
            return (f"Training does not fit into {where}: the smallest budget with a plan is {_core.format_bytes(self.smallest)}, "
                    f"and less than {_core.format_bytes(self.smallest_bound)} is impossible without offloading.")
        cost = f"{100 * self.chosen.extra:.1f} % extra time"
        if not self.fits:
            return f"Training fits into {where} at {cost}, more than the {100 * self.allowed:g} % asked for."
        states = ", optimizer=optimizer" if self.sizes["optimizer"] else ""
        return f"Training fits into {where} at {cost}: remat.wrap(model, budget={self.budget}{states})."

    def json(self) -> str:
        """The fit as a JSON document."""
        return json.dumps({**dataclasses.asdict(self), "fits": self.fits, "verdict": self.verdict}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `json()` to a file, completely or not at all."""
        write_whole(path, self.json() + "\n")

    def _rows(self) -> list[tuple[str, str]]:
        rows = [(name, _core.format_bytes(size)) for name, size in self.sizes.items() if size or name in ("parameters", "gradients")]
        rows += [("", ""), ("peak of the plain step", _core.format_bytes(self.eager_peak))]
        rows += [(p.name, f"{_core.format_bytes(p.peak):>11}  +{100 * p.extra:.1f} % time, {p.recomputed} operations again") for p in self.points]
        rows += [("smallest budget, found / proven", f"{_core.format_bytes(self.smallest)} / {_core.format_bytes(self.smallest_bound)}"), ("", "")]
        rows += [("memory of the device", _core.format_bytes(self.memory)), ("context and libraries", _core.format_bytes(self.reserved)), ("budget", _core.format_bytes(self.budget))]
        return rows

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self._rows())
        table = "\n".join(f"  {name:<{width}}  {value}".rstrip() for name, value in self._rows())
        return f"{self.model} on {self.device}\n{table}\n{self.verdict}"

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr><td>{html.escape(name)}</td><td style='text-align:right'>{html.escape(value)}</td></tr>" for name, value in self._rows() if name)
        return f"<table><caption>{html.escape(f'{self.model} on {self.device}')}</caption>{cells}</table><p>{html.escape(self.verdict)}</p>"


class Largest(int):
    """The largest value that fits: an integer with the figures of its plan."""

    point: FitPoint  #: plan for this value
    budget: int  #: bytes for training
    tried: dict[int, FitPoint | None]  #: plan per value tried; None: no plan fits


def fit(model: torch.nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *, device: str | Card | Roofline | None = None,
        optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | int | float | str | None = None, budget: int | float | str | None = None, extra: float = 0.10) -> Fit:
    """Tells whether a training step fits into the memory of a device, and how much extra time it costs. The model does not run.

    model, args, kwargs: as for `wrap`; all may be on `meta`, without any data.
    device: a name of `cards()`, a `Card`, or a `Roofline` for rates only. Default: the device at hand. Its kernels are measured; for a model
        on `meta` its rates are measured.
    optimizer: the optimizer, its class, the name of a class of `torch.optim` such as "adamw", or the bytes of its states.
    budget: bytes for training. Default: the memory of the device less context and libraries.
    extra: share of time that recomputation may cost.

    Complexity: a capture and about twenty searches of at most a second.
    Raises Refused if the model cannot be captured; Error, ValueError or TypeError for options.

        >>> print(remat.fit(model, (tokens,), device="h100-sxm", optimizer="adamw"))
    """
    asked = None if budget is None else _bytes(budget)
    card, session = _session(model, args, kwargs, device, optimizer, extra)
    available = card.available if asked is None else asked
    session._prepare(model, args, kwargs)
    sizes, plain = session._native.parts(), session.plan

    def planned(limit: int, name: str = "") -> FitPoint | None:
        return _planned(session, model, args, kwargs, limit, name)

    first = FitPoint("no recomputation", plain["peak"], 0.0, 0)
    smallest, bound = _smallest(session, model, args, kwargs, plain)
    points = [first]
    wanted = sorted({*_EXTRAS, float(extra)} - {0.0})
    curve, _ = session._native.curve("automatic", {}, 2 * _SHORT, 0.005, 0, 16)
    beyond = sizes["held"] - sizes["problem_held"]
    known = [(p["peak"] + beyond, extra_time(p["seconds"], plain["plain_seconds"])) for p in curve if p["seconds"] is not None]
    for share in wanted:
        points.append(_cheapest(share, known, points[-1], smallest, planned))
    fitting = [p for p in points if p.peak <= available]
    if first.peak > available >= smallest and (best := planned(available, "the budget")) is not None:
        fitting.append(best)
    chosen = min(fitting, key=lambda p: p.extra, default=None)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    shown = {"parameters": sizes["parameters"], "gradients": trained, "optimizer": sizes["optimizer"], "buffers": sizes["buffers"],
             "inputs": sizes["inputs"], "workspace": sizes["workspace"]}
    return Fit(type(model).__name__, card.name, card.memory, card.reserved, available, shown, sizes["held"] + sizes["plain_peak"], smallest,
               bound, tuple(points), chosen, float(extra), plain["plain_seconds"])


def largest(make_args: Callable[[int], Any], model: torch.nn.Module, *, device: str | Card | Roofline | None = None,
            values: Iterable[int] = range(1, 257), extra: float = 0.10, budget: int | float | str | None = None,
            optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | int | float | str | None = None) -> Largest:
    """Finds the largest batch, or sequence, that trains within a budget. The model does not run.

    make_args: returns the arguments of a step for a value: a tuple, a dict of keywords, or a tuple and a dict. They may be on `meta`.
    values: the candidates, integers. A larger value must take at least as much memory.
    extra: share of time that recomputation may cost.
    device, optimizer, budget: see `fit`.

    Returns the value, an integer with the attributes `point`, `budget` and `tried`.
    Complexity: log2 of the number of values, times a capture and a search.
    Raises OverBudget if not even the smallest value fits; otherwise as `fit`.

        >>> remat.largest(lambda n: (torch.zeros(n, 2048, dtype=torch.long, device="meta"),), model, device="a100-sxm-80gb", optimizer="adamw")
        12
    """
    _options.function("make_args", make_args)
    if not isinstance(values, Iterable):
        raise TypeError(f"values must be integers, got {values!r}")
    choices = list(values)
    if not choices or not all(isinstance(v, numbers.Integral) for v in choices):
        raise ValueError("values must be integers, and at least one")
    choices = sorted(set(choices))
    asked = None if budget is None else _bytes(budget)
    card, session = _session(model, *_arguments(make_args(choices[0])), device, optimizer, extra)
    available = card.available if asked is None else asked
    tried: dict[int, FitPoint | None] = {}

    def fits(value: int) -> bool:
        args, kwargs = _arguments(make_args(value))
        point = _planned(session, model, args, kwargs, available, str(value))
        tried[value] = point
        return point is not None and point.extra <= extra

    low, high = -1, len(choices)  # invariant: `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2 if low >= 0 or high < len(choices) else 0
        if fits(choices[middle]):
            low = middle
        else:
            high = middle
    if low < 0:
        why = "no plan fits" if tried[choices[0]] is None else f"it takes more than {100 * extra:g} % extra time"
        raise OverBudget(f"{choices[0]}, the smallest of the values, does not fit into {_core.format_bytes(available)} on {card.name}: {why}; it would run out of memory.")
    best = Largest(choices[low])
    point = tried[choices[low]]
    assert point is not None
    best.point, best.budget, best.tried = point, available, tried
    return best


def _session(model: torch.nn.Module, args: Any, kwargs: Any, device: Any, optimizer: Any, extra: float) -> tuple[Card, Session]:
    _options.number("extra", extra, maximum=_MOST)
    check_model(model)
    card = card_for(device, model, _tree.tensors_in((args, kwargs)))
    options = Options(time_limit=_SHORT, on_new_shape="plan", cache=False, optimizer=optimizer_bytes(optimizer, model), device=parts_of(card.roofline))
    session = prepared(model, options)
    session._native.end_when_interrupted()
    return card, session


def _planned(session: Session, model: torch.nn.Module, args: Any, kwargs: Any, limit: int, name: str) -> FitPoint | None:
    """The plan for a budget of `limit` bytes; None if no plan fits."""
    session.set_budget(limit)
    try:
        session._prepare(model, args, kwargs)
    except OverBudget:
        return None
    plan = session.plan
    return FitPoint(name, plan.peak, plan.extra, plan.recomputed)


def _smallest(session: Session, model: torch.nn.Module, args: Any, kwargs: Any, plain: Mapping[str, Any]) -> tuple[int, int]:
    """The smallest budget with a plan, and the lower bound on it."""
    session.set_budget(1)
    try:
        session._prepare(model, args, kwargs)
    except OverBudget as e:
        return plain["peak"] if e.needed is None else min(plain["peak"], e.needed + _KERNELS), e.bound
    return session.plan["smallest"], session.plan["smallest_bound"]


def _cheapest(share: float, known: list[tuple[int, float]], least: FitPoint, smallest: int, planned: Callable[..., FitPoint | None]) -> FitPoint:
    """The plan with the smallest peak found that costs at most `share` of extra time.

    known: peaks and extra times of schedules; the search begins between two of them.
    least: a plan that costs less than `share`.
    smallest: smallest budget with a plan, bytes.
    planned: makes a plan for a budget.
    """
    name = f"at most {100 * share:g} % extra time"
    low, over = max(((peak, extra) for peak, extra in known if extra > share and peak < least.peak), default=(smallest, 2 * share))
    high, under = min(((peak, extra) for peak, extra in known if extra <= share and peak < least.peak), default=(least.peak, least.extra))
    best = dataclasses.replace(least, name=name)
    aim = (over - 0.99 * share) / (over - under)  # linear interpolation between the two points
    for left in range(5, -1, -1):
        limit = low + round((high - low) * min(max(aim, 0.05), 0.95))
        if high - low < 0.005 * high or (left == 0 and best.peak > high):
            limit = high
        if limit >= best.peak:
            break
        point = planned(limit, name)
        if point is not None and point.extra <= share:
            best = point if point.peak < best.peak else best
            high, under = best.peak, point.extra
            aim = (over - 0.99 * share) / (over - under)
        else:
            low, over = limit, 2 * share if point is None else point.extra
            aim = 0.5
            if limit == high:  # the plan exceeds the peak of its schedule, as its arena is fragmented
                high, under = best.peak, best.extra
    return best


def _arguments(made: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Splits the arguments of a step, in one of the forms of `make_args`, into positional and keyword arguments."""
    if isinstance(made, Mapping):
        return (), made
    if isinstance(made, (tuple, list)):
        if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], Mapping):
            return tuple(made[0]), made[1]
        return tuple(made), {}
    return (made,), {}


def _bytes(budget: int | float | str) -> int:
    return _core.parse_bytes(_options.size("budget", budget))
