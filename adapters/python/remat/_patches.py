# SPDX-License-Identifier: Apache-2.0
"""Parts of PyTorch that are written in Python and look at what a step without data has not got: memory, and states of generators."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
import torch.utils.checkpoint

from . import _torch

_READS = ("tolist", "const_data_ptr", "__reduce_ex__", "__deepcopy__")
_SHARES = ("numpy", "data_ptr", "__array__", "__dlpack__")  # memory that may be written, too


def _first(original: Callable, tell: Callable) -> Callable:
    """The same, after `tell`, which has kernels run that have not run yet."""
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        tell(*args[:1])
        return original(*args, **kwargs)

    return method


def _about_to_read(may_write: bool, tensor: torch.Tensor) -> None:
    _torch.about_to_read(tensor, may_write)


def _checkpoint(original: Callable) -> Callable:
    """The pre-forward and post-forward logic of a checkpoint without reentrant autograd; there is none in steps without data."""
    @functools.wraps(original)
    def generator(*args: Any, **kwargs: Any) -> Any:
        return iter((None,)) if _torch.without_data() else original(*args, **kwargs)

    return generator


def _reentrant(original: Callable) -> Callable:
    @functools.wraps(original)
    def apply(function: Callable, preserve: bool, *args: Any) -> Any:
        if not _torch.without_data():
            return original(function, preserve, *args)
        trained = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(trained):
            return function(*args)

    return apply


@functools.cache
def install() -> None:
    """Has these parts tell the planner, and has it decide instead of `torch.utils.checkpoint` what is recomputed. Once for the process."""
    for names, may_write in ((_READS, False), (_SHARES, True)):
        for name in names:
            if (original := getattr(torch.Tensor, name, None)) is not None:
                setattr(torch.Tensor, name, _first(original, functools.partial(_about_to_read, may_write)))
    for module in (torch, torch.random, torch.cuda, torch.cuda.random):
        module.get_rng_state = _first(module.get_rng_state, lambda *_: _torch.about_to_read_generator())
    at = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator_impl"
    setattr(at, name, _checkpoint(getattr(at, name)))
    at.CheckpointFunction.apply = _reentrant(at.CheckpointFunction.apply)
