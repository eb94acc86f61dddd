# SPDX-License-Identifier: Apache-2.0
"""The planner: problems and schedules as dictionaries."""

from __future__ import annotations

import json as _json
import numbers as _numbers
from typing import Any, Callable, Mapping, cast

from . import _core, _options


def solve(problem: Mapping[str, Any], budget: int | float | str, *, solver: str = "automatic",
          solver_options: Mapping[str, int | float | bool] = {}, backend: str = "auto", time_limit: float = 60.0, threads: int = 1,
          seed: int = 0, gap: float = 1e-4, observer: Callable[[str, float, float, float], Any] | None = None,
          start: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Searches for the fastest schedule of `problem` within `budget`.

    problem: a remat-problem as a dictionary.
    budget: bytes for everything on the device, as a number or as text: 1234, "1.5GiB", "60%" (held sources + 60 % of the bytes
        that store-all needs beyond them).
    solver: name of a solver, see `solvers()`.
    backend: MILP library: "highs", "glpk" or "auto".
    solver_options: see `solver_options()`.
    time_limit: seconds.
    threads, seed, gap: see `remat::limits`.
    start: first incumbent: a remat-schedule of the problem as a dictionary. It may exceed the budget. If it fits, the answer is never slower.
    observer: called as observer(stage, elapsed, best, bound) while the search runs. If it returns False, the search stops.

    Returns a remat-schedule as a dictionary. Its `steps` are empty unless `status` is "optimal" or "feasible". Other values of `status`: "time_limit", the
        time was up; "not_found", the method ended without a schedule; "not_applicable", the method does not support this problem. `reason` may say more.
    Raises Error (a ValueError), ValueError or TypeError for bad input; the message names the cause.
    """
    problem_text, begin = _options.document("problem", problem), "" if start is None else _options.document("start", start)
    for name, text in (("solver", solver), ("backend", backend)):
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a name, got {text!r}")
    for name, value in (("time_limit", time_limit), ("gap", gap)):
        _options.number(name, value)
    for name, count, minimum, maximum in (("threads", threads, 0, (1 << 31) - 1), ("seed", seed, 0, (1 << 64) - 1)):
        _options.number(name, count, _numbers.Integral, minimum, maximum)
    if observer is not None:
        _options.function("observer", observer)
    schedule_text = _core.solve(problem_text, _budget(budget), solver, _options.of_solver(solver_options), backend, time_limit, threads,
                                seed, gap, observer, begin)
    return cast("dict[str, Any]", _json.loads(schedule_text))


def _budget(budget: Any) -> str:
    """A budget as text: a share or bytes."""
    return budget if isinstance(budget, str) and budget.rstrip().endswith("%") else _options.size("budget", budget)


def evaluate(problem: Mapping[str, Any], schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluates a remat-schedule without running it.

    Returns a dictionary: "peak" (bytes), "peaks" (bytes per tier), "seconds", "recomputed", "memory" (bytes on the device per step).
    Raises Error naming the step that breaks a rule.
    """
    return _core.evaluate(_options.document("problem", problem), _options.document("schedule", schedule))


def solvers() -> dict[str, str]:
    """The names of the solvers, with a summary of each."""
    return dict(_core.solvers())


def solver_options(solver: str) -> dict[str, str]:
    """The names of the options of a solver, each with default, meaning and range. For `solver_options` of `solve`, `plan`, `curve` and `Planner`.

    Raises Error for an unknown solver.
    """
    return {name: f"{standard}: {summary}; {values}" for name, standard, values, summary in _core.solver_options(solver)}
