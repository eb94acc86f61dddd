# SPDX-License-Identifier: Apache-2.0
"""Plans for Python, and reports about them."""

from __future__ import annotations

import dataclasses
import html
import numbers
import os
from typing import TYPE_CHECKING, AbstractSet, Any, Iterator, Mapping

from . import _core, _options
from ._errors import Error

if TYPE_CHECKING:
    from ._torch import StepPlan


def extra_time(seconds: float, plain_seconds: float) -> float:
    """Extra time as a share: 0.1 is 10 % slower than without recomputation."""
    return seconds / plain_seconds - 1 if plain_seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Plan(Mapping[str, Any]):
    """The plan of a training step. Its figures are attributes, and items as in a dictionary: `plan.peak` is `plan["peak"]`.

    Two plans are equal if their items are equal.
    """

    status: str  #: "optimal", "feasible", ...
    inputs: str  #: description of the inputs of the plan
    solver: str
    peak: int  #: bytes, with parameters, gradients and states
    seconds: float  #: predicted time of the operators
    plain_seconds: float  #: predicted time without recomputation
    bound: float  #: lower bound on the seconds of every plan within the budget
    gap: float  #: relative distance between `seconds` and `bound`
    smallest: int  #: smallest budget for which a plan is known, bytes
    smallest_bound: int  #: lower bound on every budget with a plan, bytes
    operations: int  #: computations in a step, recomputations included
    recomputed: int  #: recomputations in a step
    moved: int  #: bytes per step copied off the device and back
    waited: float  #: seconds spent waiting for copies so far
    fallback: bool = False  #: the solver found no plan within the budget: this plan comes from the search for the smallest budget
    again: AbstractSet[str] = frozenset()  #: names of the operators that are recomputed
    _step: StepPlan | None = dataclasses.field(default=None, metadata={"hidden": True})
    _sources: dict[str, str] = dataclasses.field(default_factory=dict, metadata={"hidden": True})  # by module path

    @classmethod
    def of(cls, figures: Mapping[str, Any], sources: dict[str, str] | None = None) -> Plan:
        """Makes a plan from the figures of a session of `_torch`."""
        members = dict(figures)
        return cls(_step=members.pop("step", None), _sources=sources or {}, **members)

    def __getitem__(self, name: str) -> Any:
        if name not in _ITEMS:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_ITEMS)

    def __len__(self) -> int:
        return len(_ITEMS)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.of, (dict(self),)  # a pickle holds only the figures

    @property
    def extra(self) -> float:
        """Extra time as a share: 0.1 is 10 % slower than without recomputation."""
        return extra_time(self.seconds, self.plain_seconds)

    def __repr__(self) -> str:
        return f"<remat.Plan {self.status}: {_core.format_bytes(self.peak)}, {100 * self.extra:.3g} % extra time>"

    def __str__(self) -> str:
        again = f"{self.recomputed} of {self.operations} operations run again" if self.recomputed else "nothing is recomputed"
        rows = _rows(self)
        width = max(len(name) for name, _ in rows)
        return (f"A step takes {_core.format_bytes(self.peak)} and {100 * self.extra:.3g} % extra time; {again}.\n"
                + "".join(f"  {name:<{width}}  {text}\n" for name, text in rows).rstrip("\n"))

    def _repr_html_(self) -> str:
        cells = "".join(f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{html.escape(text)}</td></tr>' for name, text in _rows(self))
        return f"<p>{html.escape(str(self).partition(chr(10))[0])}</p><table>{cells}</table>"

    def document(self) -> str:
        """The plan and its problem, as a remat-schedule (docs/problem-and-schedule.md).

        Raises Error unless this is the plan used last, `remat.of(model).plan`.
        """
        if self._step is None:
            raise Error("this plan holds only figures: ask for the plan used last, remat.of(model).plan, which also holds its steps")
        return self._step.document(self._sources)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `document()`, for `remat report`."""
        write_whole(path, self.document())

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes computations, copies and memory over time, for Perfetto and chrome://tracing."""
        write_whole(path, _core.chrome_trace(self.document(), ""))

    def memory_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes the planned memory as a snapshot for pytorch.org/memory_viz."""
        write_whole(path, _core.memory_snapshot(self.document(), ""))

    def report(self, *, time_limit: float = 10.0, points: int = 12) -> Report:
        """A report on the plan.

        time_limit: time limit of the searches for other budgets, seconds.
        points: number of budgets of the curve.
        """
        return Report(str(self), self, "", time_limit, points)


_ITEMS = {f.name: None for f in dataclasses.fields(Plan) if not f.metadata}


def _rows(plan: Plan) -> list[tuple[str, str]]:
    size, time = _core.format_bytes, _core.format_seconds
    rows = [("peak", f"{size(plan.peak)} ({plan.peak} bytes)"), ("time", f"{time(plan.seconds)}, {time(plan.plain_seconds)} without recomputation"),
            ("status", f"{plan.status}, at most {100 * plan.gap:.2g} % slower than any other plan within the budget"),
            ("smallest budget", f"at most {size(plan.smallest)}, at least {size(plan.smallest_bound)} (proven)")]
    if plan.moved:
        rows.append(("moved", f"{size(plan.moved)} per step"))
    if plan.inputs:
        rows.append(("inputs", plan.inputs))
    return rows


MOST_POINTS = 1 << 20  #: largest number of budgets of a curve


class Report(str):
    """A table as text, and a page with pictures: see `save`."""

    _plan: str | Plan
    _problem: str
    _limits: tuple[float, int]
    _page: str | None

    def __new__(cls, text: str, plan: str | Plan, problem: str = "", time_limit: float = 10.0, points: int = 12) -> Report:
        _options.number("time_limit", time_limit)
        _options.number("points", points, numbers.Integral, 1, MOST_POINTS)
        report = super().__new__(cls, text)
        report._plan, report._problem, report._limits, report._page = plan, problem, (time_limit, points), None
        return report

    def _document(self) -> str:
        return self._plan if isinstance(self._plan, str) else self._plan.document()

    def html(self) -> str:
        """One page without external resources. The first call plans for other budgets, for at most `time_limit` seconds."""
        if self._page is None:
            self._page = _core.html_report(self._document(), self._problem, "automatic", *self._limits, None)
        return self._page

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page to a file, completely or not at all."""
        write_whole(path, self.html())

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.html())}" style="width:100%;height:48rem;border:0"></iframe>'

    def __reduce__(self) -> tuple[Any, ...]:
        return Report, (str(self), self._document(), self._problem, *self._limits)


def report(plan: Plan | Mapping[str, Any] | str | os.PathLike[str], problem: Mapping[str, Any] | None = None, *, time_limit: float = 10.0,
           points: int = 12) -> Report:
    """A report on a plan.

    plan: result of `remat.plan`, a remat-schedule as a dictionary, or a file with a remat-schedule.
    problem: the remat-problem of the plan, unless the plan holds it.
    time_limit, points: see `Plan.report`.
    Raises Error for a file that is no plan, and for a plan without a problem.
    """
    if isinstance(plan, Plan):
        return plan.report(time_limit=time_limit, points=points)
    name = "the plan"
    if isinstance(plan, (str, os.PathLike)):
        name = os.fspath(plan)
        try:
            with open(plan, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as e:
            raise Error(f"{name}: {e.strerror if isinstance(e, OSError) else 'not a text file'}") from None
    else:
        text = _options.document("plan", plan)
    problem_text = "" if problem is None else _options.document("problem", problem)
    try:
        peak, seconds = _core.plan_figures(text, problem_text)
    except Error as e:
        raise Error(f"{name}: {e}") from None
    return Report(f"{name}: peak {_core.format_bytes(peak)}, {_core.format_seconds(seconds)} per step", text, problem_text, time_limit, points)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path must be that of a file, got {path!r}")
    _core.write_file(os.fsdecode(path), content.encode() if isinstance(content, str) else content)
