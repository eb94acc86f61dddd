# SPDX-License-Identifier: Apache-2.0
"""Where the modules of a model are defined."""

from __future__ import annotations

import inspect
import os
from typing import Any, Callable

import torch


def sources(model: torch.nn.Module) -> dict[str, str]:
    """By module path: file, line and name of the `forward` that the module runs.

    Modules of PyTorch itself take the place of the module around them, as the user's code calls them there.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        own = _line(type(module))
        around = found.get(path.rpartition(".")[0] if path else "", "")
        found[path] = own or around
    return found


def _line(cls: type[torch.nn.Module]) -> str:
    """Of the `forward` of a class; empty for PyTorch's own."""
    forward: Callable[..., Any] = cls.forward
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or code.co_filename.startswith(torch.__path__[0]):
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} {cls.__qualname__}.forward"
