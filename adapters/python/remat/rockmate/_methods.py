# SPDX-License-Identifier: Apache-2.0
"""Translation of Rockmate's solvers and options to methods of remat and their options."""

from __future__ import annotations

import functools
from typing import Any, Callable, Mapping, NamedTuple

from .. import _core
from .._errors import Error
from .._wrap_options import Options
from ._configs import Config

Path = tuple[str, ...]  #: path of an option in a configuration, such as ("solver", "top", "hilp", "time_limit")

_NOTHING_IS_CHEAP = 1e6  #: from this cheap_factor on, a CheapSolver recomputes nothing
_MOST_SLOTS = 10_000  #: largest number of slots of the dynamic programs
_BOTTOM = ("solver", "bottom", "hilp")
#: Options of partitioners for the size of parts (_SIZES) and the number of parts (_NUMBERS).
_SIZES = {("partitioner", "bottom_to_top", "max_estimate_per_sub_graph"), ("partitioner", "dagp", "max_estimate_per_sub_graph")}
_NUMBERS = {("partitioner", "bottom_to_top", "max_estimate_for_main_graph"), ("partitioner", "dagp", "max_estimate_for_main_graph"),
            ("partitioner", "repetitive", "max_number_of_patterns")}


def _twice(nodes: int) -> int:
    """Number of operations of `nodes` nodes: Rockmate counts only the forward, remat also the backward."""
    return 2 * nodes


def _share(parts: int, count: int) -> int:
    """Schedules per part, out of `count` schedules for all parts."""
    return max(1, count // parts)


def _same(count: int) -> int:
    return count


#: Per option of Rockmate: the matching option of remat's `hiremate` and `rockmate`, and the function that converts its value.
_OF_PARTS: dict[Path, tuple[str, Callable[[int], int]]] = {
    (*_BOTTOM, "nb_bdg_save"): ("saved", _same), (*_BOTTOM, "nb_bdg_peak"): ("peaks", _same), (*_BOTTOM, "nb_total_nodes"): ("leaf_operations", _twice),
    **{path: ("cut.size", _twice) for path in _SIZES}, **{path: ("cut.most", _same) for path in _NUMBERS}}


class Method(NamedTuple):
    """A method of remat."""

    solver: str
    time_limit: float = Options.time_limit  #: seconds
    options: Mapping[str, int] = {}
    unit: int | None = None  #: bytes per slot of a dynamic program; None: the method's default

    def options_for(self, budget: int | None) -> dict[str, int]:
        """Options of the method for a budget in bytes (None: no limit)."""
        if self.unit is None or budget is None:
            return dict(self.options)
        return {**self.options, "slots": min(_MOST_SLOTS, max(1, -(-budget // self.unit)))}


def methods_of(config: Config, chosen: Mapping[Path, Any]) -> tuple[list[Method], set[Path]]:
    """The methods of remat for the top solvers of a configuration, and those options of `chosen` that have an effect on them.

    chosen: options of the configuration that the user has changed. For all others, remat's defaults apply.
    Raises Error naming an option whose value the method does not accept.
    """
    methods: list[Method] = []
    used: set[Path] = set()

    def steer(solver_options: dict[str, int], solver: str, path: Path, option: str, value: Callable[[int], int]) -> None:
        if path not in chosen:
            return
        solver_options[option] = value(chosen[path])
        used.add(path)
        try:
            _core.check_solver(solver, {option: str(solver_options[option])})
        except Error as e:
            raise Error(f"{'.'.join(path)}={chosen[path]!r}: {e}") from None

    for name, options in config.solver.top.items():
        top = ("solver", "top", name)
        solver = _solver(name, options, config)
        solver_options: dict[str, int] = {}
        if solver in ("hiremate", "rockmate"):
            for path, (option, value) in _OF_PARTS.items():
                steer(solver_options, solver, path, option, value)
        if solver == "hiremate":
            parts = solver_options.get("cut.most") or next(int(standard) for option, standard, *_ in _core.solver_options(solver) if option == "cut.most")
            steer(solver_options, solver, (*top, "nb_total_sched"), "choices", functools.partial(_share, parts))
        used |= {(*top, key) for key in ("time_limit", "offload")}
        if options.get("offload"):
            used |= {(*top, key) for key in ("activation_offload", "add_offload_sched")}
        if solver == "store_all":
            used.add((*top, "cheap_factor"))
        unit = chosen.get((*top, "mem_unit")) if name == "rotor" else None
        if unit is not None:
            if unit < 1:
                raise Error(f"{'.'.join(top)}.mem_unit must be >= 1, got {unit}")
            used.add((*top, "mem_unit"))
        methods.append(Method(solver, float(chosen.get((*top, "time_limit"), Options.time_limit)), solver_options, unit))
    return methods or [Method("auto")], used & chosen.keys()


def _solver(name: str, options: Config, config: Config) -> str:
    if name == "hilp":
        return "auto" if options.offload else "hiremate" if config.partitioner.keys() - {"base"} else "checkmate"
    if name == "rotor":
        return "rockmate" if "hilp" in config.solver.bottom else "rotor"
    if name == "cheap":
        return "store_all" if options.cheap_factor >= _NOTHING_IS_CHEAP else "min_cut"
    return name
