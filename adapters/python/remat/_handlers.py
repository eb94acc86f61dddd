# SPDX-License-Identifier: Apache-2.0
"""Tells whether the model handles errors of the operator that it calls."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import types
import warnings
from typing import Any

import torch

_HERE = __file__.rpartition("/")[0] + "/"
_OUTSIDE = f"{_HERE}_calls.py"  #: file that calls forwards: its callers are not the model
_TRIES: tuple[Any, ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))


def has_handler() -> bool:
    """True if a line of the running forward is inside a `try` with an `except`, or inside `contextlib.suppress`."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _OUTSIDE:
        file = frame.f_code.co_filename
        if not file.startswith((torch.__path__[0] + "/", _HERE)) and frame.f_lineno in _handled_lines(file):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=1024)
def _handled_lines(file: str) -> frozenset[int]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return frozenset()
    bodies: Any = (getattr(node, "body") for node in ast.walk(tree) if (isinstance(node, _TRIES) and node.handlers) or _suppresses(node))
    return frozenset(line for body in bodies for line in range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1))


def _suppresses(node: ast.AST) -> bool:
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)] if isinstance(node, (ast.With, ast.AsyncWith)) else []
    return any(getattr(c.func, "attr", getattr(c.func, "id", "")) == "suppress" for c in calls)
