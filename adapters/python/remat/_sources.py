# SPDX-License-Identifier: Apache-2.0
"""Source lines of the modules of a model."""

from __future__ import annotations

import inspect
import os
from typing import Any, Callable

import torch


def sources(model: torch.nn.Module) -> dict[str, str]:
    """Maps the path of each module to file, line and name of its `forward`.

    A module of PyTorch gets the line of the module around it, as the user's code calls it there.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        own = _line(type(module))
        around = found.get(path.rpartition(".")[0] if path else "", "")
        found[path] = own or around
    return found


def _line(cls: type[torch.nn.Module]) -> str:
    """File, line and name of the `forward` of a class; empty for PyTorch's own classes."""
    forward: Callable[..., Any] = cls.forward
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or code.co_filename.startswith(torch.__path__[0]):
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} {cls.__qualname__}.forward"
