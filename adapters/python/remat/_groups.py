# SPDX-License-Identifier: Apache-2.0
"""Rarely used options of `wrap`, in two groups."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Literal, Mapping

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """How plans are made and checked: `remat.wrap(model, budget="6 GiB", planner=remat.Planner(time_limit=60))`."""

    activation_budget: int | float | str | None = None
    """In place of `budget`: bytes for activations, outputs and new gradients. Bytes held before the step come on top."""
    solver: str = "auto"  #: a name of `solvers()`
    solver_options: Mapping[str, int | float | bool] = dataclasses.field(default_factory=dict, hash=False)
    """Options of the solver, such as `{"saved": 2}` for "rockmate". `remat.solver_options("rockmate")` lists them. An unknown name raises Error."""
    time_limit: float = 20.0  #: time limit of a search, seconds
    first_limit: float = 1.0
    """Longest time that a step waits for its plan, in seconds, provided that a plan within the budget is found by then. The search continues beside the
    following steps for the rest of `time_limit`; they adopt better plans."""
    gap: float = 0.005  #: a search ends at this relative distance to the proven bound
    seed: int = 0  #: seed of the search
    follow: bool | None = None
    """True runs the Python code of the module in every step, on tensors without data, and compares its operator calls with the recorded calls. So state that
    the code reads or changes, hooks and exceptions are those of eager mode. A step that takes another path is recorded from there on, and planned at once.
    False replays the recorded forward, for forwards that are pure functions of their arguments. Default: True."""
    on_new_shape: Literal["nearest", "plan", "plain", "error"] = "nearest"
    """How to handle a call with new shapes. "nearest" takes over the decisions of a plan for another shape if possible, "plan" plans anew, "plain" runs
    the model plain, "error" raises Refused."""
    verify: int = 0
    """The first `verify` steps also run plain, twice, and are compared bit by bit. The first difference raises NotEqual. A tensor that differs between two
    plain runs is not compared. A warning in the log `remat` then names the tensor, and the operators that give other bits each time."""
    graph: bool = False
    """Captures the kernels of each plan as CUDA graphs in its second step, and replays them from then on, recomputations, copies and random numbers
    included. Works on any accelerator with graphs. Several input shapes share one arena. Inputs are copied into it; the budget counts these copies. A plan
    that cannot be captured warns once, names the operator and the cause, and launches its kernels one by one. On the host a step raises Refused."""


@dataclasses.dataclass(frozen=True)
class Offload:
    """Options for data that leaves the memory of the device: `remat.wrap(model, budget="6 GiB", disk="/scratch", offload=remat.Offload("all", weights="planned"))`."""

    kind: Literal["none", "activations", "optimizer", "all", "auto"] = "none"  #: as the text `offload` of `wrap`
    _: dataclasses.KW_ONLY
    weights: Literal["paged", "planned"] = "paged"
    """For weights in files. "paged" lets the operating system page them; they count for no budget. "planned" lets plans fetch weights before their use, beside
    the computations, and drop them; the budget then counts them."""
    disk_budget: int | str | None = None
    """Largest number of bytes on the disk, for each of activations, weights, gradients and states. Default: the free bytes."""
    device: str | torch.device | None = None
    """With kind "all": device of the steps, while weights and gradients are in page-locked memory of the host, as in OffMate. Default: the device of the model.

    Steps fetch weights before their use and drop them. Gradients leave the device as soon as they are complete. The plan covers these copies, those of
    activations, and recomputation. `remat.optimizer` chooses the place of its arithmetic. Buffers are on the device; inputs may be on the host.

    `host_budget` then limits weights, gradients and activations together. `disk` holds the states. It also holds the activations, unless `host_budget` leaves
    at least the size of the weights for them. It also holds the weights, if weights and gradients exceed `host_budget`."""


_GROUP = {f.name: (group, word) for group, word in ((Planner, "planner"), (Offload, "offload")) for f in dataclasses.fields(group) if f.name != "kind"}
_KEPT = ("device",)  # options that `wrap` still takes itself, as OffMate does


def flattened(offload: Any, planner: Any, older: dict[str, Any]) -> dict[str, Any]:
    """All options of both groups by name.

    older: options given to `wrap` itself, as before version 0.3; they cause a DeprecationWarning.
    Raises TypeError for an unknown option, for an option given twice, and for a group of another type.
    """
    if planner is not None and not isinstance(planner, Planner):
        raise TypeError(f"planner must be a remat.Planner, got {planner!r}")
    groups: list[Any] = [planner or Planner(), offload if isinstance(offload, Offload) else Offload(offload)]
    found = {f.name: getattr(group, f.name) for group in groups for f in dataclasses.fields(group)}
    found["offload"] = found.pop("kind")
    for name, value in older.items():
        if name not in _GROUP:
            raise TypeError(f"remat.wrap has no option {name!r}")
        group, word = _GROUP[name]
        if (word == "planner" and planner is not None) or (word == "offload" and isinstance(offload, Offload)):
            raise TypeError(f"{name} belongs into remat.{group.__name__}, which is given too")
        if name not in _KEPT:
            warnings.warn(f"remat.wrap({name}=...) goes with version 0.4: pass {word}=remat.{group.__name__}({name}=...)", DeprecationWarning, stacklevel=3)
        found[name] = value
    return found
