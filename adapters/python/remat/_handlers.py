# SPDX-License-Identifier: Apache-2.0
"""Tells whether the model handles errors of the operator that it calls."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import textwrap
import types
import warnings
from collections import ChainMap, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

_HERE = __file__.rpartition("/")[0] + "/"
_TORCH = torch.__path__[0] + "/"
_OUTSIDE = f"{_HERE}_calls.py"  #: file that calls forwards: its callers are not the model
_TRIES: tuple[Any, ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))
_WITHS: tuple[Any, ...] = (ast.With, ast.AsyncWith)


def has_handler() -> bool:
    """True if a line of the running forward is inside a `try` with an `except`, or inside a `with` whose `__exit__` may handle errors."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _OUTSIDE:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE)):
            tries, contexts = _handlers_in(file)
            if frame.f_lineno in tries:
                return True
            if frame.f_lineno in contexts:
                names = ChainMap(frame.f_locals, frame.f_globals, frame.f_builtins)
                if any(_may_handle(context, names) for context in contexts[frame.f_lineno]):
                    return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=1024)
def _handlers_in(file: str) -> tuple[frozenset[int], Mapping[int, list[ast.expr]]]:
    """Returns the lines inside of a `try` with an `except`; and per line: the contexts of each `with` around it."""
    nodes = _nodes("".join(linecache.getlines(file)))
    contexts: dict[int, list[ast.expr]] = defaultdict(list)
    for node in nodes:
        for line in _lines(node.body) if isinstance(node, _WITHS) else ():
            contexts[line] += [item.context_expr for item in node.items]
    return frozenset(line for node in nodes if _is_handling(node) for line in _lines(node.body)), dict(contexts)


def _nodes(source: str) -> list[Any]:
    """Source that cannot be parsed counts as empty."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return []


def _is_handling(node: Any) -> bool:
    return isinstance(node, _TRIES) and bool(node.handlers)


def _lines(body: list[ast.stmt]) -> range:
    return range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)


def _may_handle(context: ast.expr, names: Mapping[str, Any], around: frozenset[types.CodeType] = frozenset()) -> bool:
    """True if the manager of a `with` may handle errors. A manager that cannot be found does not.

    around: generators of managers whose `with` this is; they may call themselves.
    """
    called = isinstance(context, ast.Call)
    manager = _value(context.func if isinstance(context, ast.Call) else context, names)
    kind = manager if called else type(manager)
    generator = getattr(kind if called else manager, "__wrapped__" if called else "func", None)  # of a `contextlib.contextmanager`
    leave = generator if inspect.isgeneratorfunction(generator) else getattr(kind, "__exit__", None) if isinstance(kind, type) else None
    if not isinstance(leave, types.FunctionType) or leave.__code__ in around or leave.__code__.co_filename.startswith(_TORCH):
        return False
    return _handles(leave, around | {leave.__code__})


def _handles(leave: types.FunctionType, around: frozenset[types.CodeType]) -> bool:
    """True if an `__exit__` may return a true value, or the generator of a manager may handle what is raised at its `yield`."""
    nodes = _nodes_of(leave.__code__)
    if not inspect.isgeneratorfunction(leave):
        return any(isinstance(n, ast.Return) and n.value is not None and not (isinstance(n.value, ast.Constant) and not n.value.value) for n in nodes)
    names = ChainMap(dict(inspect.getclosurevars(leave).nonlocals), leave.__globals__)
    blocks = [n for n in nodes if isinstance(n, _TRIES + _WITHS) and any(isinstance(x, ast.Yield) for b in n.body for x in ast.walk(b))]
    contexts = [item.context_expr for n in blocks if isinstance(n, _WITHS) for item in n.items]
    return any(map(_is_handling, blocks)) or any(_may_handle(context, names, around) for context in contexts)


@functools.lru_cache(maxsize=1024)
def _nodes_of(code: types.CodeType) -> list[Any]:
    try:
        return _nodes(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError):
        return []


def _value(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a name with attributes, without running code; None: it is not there."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id)
    if not isinstance(expression, ast.Attribute):
        return None
    owner = _value(expression.value, names)
    found = inspect.getattr_static(owner, expression.attr, None) if owner is not None else None
    return getattr(found, "__func__", found)
