# SPDX-License-Identifier: Apache-2.0
"""What `wrap` puts into the `__dict__` of a model."""

from __future__ import annotations

import copy
import sys
from typing import Any, Callable

import torch

from ._errors import Refused

SLOT = "_remat"  #: key of the session
NO_REPLICAS = ("nn.DataParallel copies a wrapped model into threads, whose plans would share one memory; start one process per device "
               "with torchrun and DistributedDataParallel")


def _replicate_for_data_parallel(self: torch.nn.Module) -> Any:
    raise Refused(NO_REPLICAS, advice="torchrun")


def _getstate(self: Any) -> Any:
    """The state for a pickle or a shallow copy: the plain model. `copy.deepcopy` makes a wrapped copy."""
    cls: Any = type(self)
    state = cls.__getstate__(self) if hasattr(cls, "__getstate__") else dict(self.__dict__)
    if not isinstance(state, dict) or sys._getframe(1).f_code is copy.deepcopy.__code__:
        return state
    state = {name: value for name, value in state.items() if name not in (SLOT, *METHODS)}
    if self.__dict__[SLOT]._original is not None:
        state["forward"] = self.__dict__[SLOT]._original
    return state


#: Methods that are the same for all models.
FIXED_METHODS: dict[str, Callable[..., Any]] = {"_replicate_for_data_parallel": _replicate_for_data_parallel, "__getstate__": _getstate}
#: Names of all methods.
METHODS = ("forward", *FIXED_METHODS)
