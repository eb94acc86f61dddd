# SPDX-License-Identifier: Apache-2.0
"""Rematerialization: training within a budget of bytes.

Any PyTorch model, in place:

    import remat
    model = remat.wrap(model, budget="6 GiB")   # the same object; train it as before
    print(remat.of(model).report())

Any DAG, as dictionaries of the exchange formats (docs/problem-and-schedule.md):

    import json, remat
    problem = json.load(open("bench/instances/resnet18.json"))
    plan = remat.solve(problem, "60%", time_limit=10)
    print(plan["status"], plan["peak"], plan["seconds"], plan["bound"])
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING, Any

from ._core import __version__
from ._errors import CopyFailed, DeviceLost, Error, NoSpace, NotEqual, OverBudget, Refused
from ._planner import evaluate, solve, solver_options, solvers
from ._report import Plan, Report, report

if TYPE_CHECKING:
    from ._cards import Card, card, cards
    from ._devices import devices
    from ._fit import Fit, FitPoint, Largest, fit, largest
    from ._groups import Offload, Planner
    from ._optimizer import offloaded, optimizer
    from ._plan import Curve, Roofline, curve, plan
    from ._session import Session
    from ._wrap import is_wrapped, of, unwrap, wrap

#: Names that need torch, and their modules. torch is imported when a name is first used.
_WITH_TORCH = {"Card": "_cards", "card": "_cards", "cards": "_cards", "Fit": "_fit", "FitPoint": "_fit", "Largest": "_fit", "fit": "_fit", "largest": "_fit", "Offload": "_groups", "Planner": "_groups",
               "Curve": "_plan", "Roofline": "_plan", "Session": "_session", "curve": "_plan", "plan": "_plan", "is_wrapped": "_wrap", "of": "_wrap", "unwrap": "_wrap", "wrap": "_wrap",
               "devices": "_devices", "offloaded": "_optimizer", "optimizer": "_optimizer"}

__all__ = ["CopyFailed", "DeviceLost", "Error", "NoSpace", "NotEqual", "OverBudget", "Plan", "Refused", "Report", "__version__", "evaluate", "report", "solve", "solver_options", "solvers",
           *_WITH_TORCH]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'remat' has no attribute {name!r}")
    try:
        found = getattr(_importlib.import_module("." + _WITH_TORCH[name], __name__), name)
    except ImportError as e:
        if e.path is None:  # a missing module, such as torch
            raise
        import torch

        raise ImportError(f"remat's part for PyTorch cannot be loaded beside torch {torch.__version__}: {str(e).splitlines()[0]}. "
                          "It is built for one version of torch: install remat again beside this one", name=e.name, path=e.path) from e
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
