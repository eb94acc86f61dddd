# SPDX-License-Identifier: Apache-2.0
"""Where the modules of a model are defined."""

from __future__ import annotations

import functools
import os

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


@functools.lru_cache(maxsize=1024)
def _line(cls: type[torch.nn.Module]) -> str:
    """Of the `forward` of a class; empty for PyTorch's own."""
    code = getattr(cls.forward, "__code__", None)
    if code is None or code.co_filename.startswith(torch.__path__[0]):
        return ""
    file = os.path.relpath(code.co_filename) if code.co_filename.startswith(os.getcwd() + os.sep) else os.path.basename(code.co_filename)
    return f"{file}:{code.co_firstlineno} {cls.__qualname__}.forward"
