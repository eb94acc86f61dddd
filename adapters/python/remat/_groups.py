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
    """In place of `budget`: bytes for activations, outputs and new gradients. What is held before the step comes on top."""
    solver: str = "auto"  #: a name of `solvers()`
    solver_options: Mapping[str, int | float | bool] = dataclasses.field(default_factory=dict, hash=False)
    """Of the solver, such as `{"saved": 2}` for "rockmate": `remat.solver_options("rockmate")` lists them. Another name raises Error."""
    time_limit: float = 20.0  #: time limit of a search, seconds
    first_limit: float = 1.0
    """Seconds that a step waits for its plan, if one that fits is found by then. The search goes on beside the following steps for the rest of `time_limit`,
    and they adopt what it finds."""
    gap: float = 0.005  #: a search ends at this relative distance to the proven bound
    seed: int = 0  #: seed of the search
    follow: bool | None = None
    """True runs the module's own Python in every step, on tensors without data, and compares its operator calls with the recorded ones. State that it reads
    or changes, hooks and exceptions are then those of eager mode. A step that takes another path is recorded from there on, and planned at once.
    False replays the recorded forward: for forwards that are pure functions of their arguments. Default: True."""
    on_new_shape: Literal["nearest", "plan", "plain", "error"] = "nearest"
    """What a call with other shapes does: "nearest" takes over the decisions of a plan for another shape where it can, "plan" plans anew, "plain" runs
    the model as it is, "error" raises Refused."""
    verify: int = 0
    """The first `verify` steps also run plain, twice, and are compared bit by bit; the first difference raises NotEqual. A tensor that differs between two
    plain runs is not compared: a warning in the log `remat` names it, and the operators that give other bits each time."""
    graph: bool = False
    """Captures the kernels of each plan as CUDA graphs (of any accelerator that has them) in its second step, and replays them from then on, with
    recomputations, copies and random numbers. Several input shapes share one arena. Inputs are copied into it; the budget counts these copies. A plan that
    cannot be captured warns once, names the operator and the cause, and launches its kernels one by one. On the host it raises Refused."""


@dataclasses.dataclass(frozen=True)
class Offload:
    """Options for data that leaves the memory of the device: `remat.wrap(model, budget="6 GiB", disk="/scratch", offload=remat.Offload("all", weights="planned"))`."""

    kind: Literal["none", "activations", "optimizer", "all", "auto"] = "none"  #: as the text `offload` of `wrap`
    _: dataclasses.KW_ONLY
    weights: Literal["paged", "planned"] = "paged"
    """Of weights in files: "paged" leaves it to the system what of them is in memory. "planned" has steps fetch weights before they are used, beside the
    computations, and drop them, within the budget, which counts them then."""
    disk_budget: int | str | None = None
    """Bytes that each of activations, weights, gradients and states may take on the disk. Default: what is free."""
    device: str | torch.device | None = None
    """With kind "all": where steps run while weights and gradients are in page-locked memory of the host, as OffMate does. Steps fetch weights before
    they are used and drop them; gradients leave as soon as they are complete. The plan covers these copies, those of activations, and recomputation.
    `remat.optimizer` chooses where its arithmetic is done. Buffers are on the device; inputs may be on the host. `host_budget` is for weights, gradients and
    activations then. `disk` gets states; activations unless `host_budget` leaves as much for them as the weights take; and weights if these and the
    gradients take more than `host_budget`. Default: where the model is."""


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
