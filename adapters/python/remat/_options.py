# SPDX-License-Identifier: Apache-2.0
"""Checks of options. Errors name the option."""

from __future__ import annotations

import json
import math
import numbers
import os
from typing import Any, Callable, Mapping

from . import _core
from ._errors import Error


def size(name: str, value: Any, parse: Callable[[str], Any] = _core.parse_bytes) -> str:
    """Converts a size in bytes, given as number or text, to text.

    parse: checks the text; raises Error for a bad one.
    Raises TypeError, ValueError or Error.
    """
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, str)):
        raise TypeError(f'{name} must be a number of bytes or a text such as "6 GiB", got {value!r}')
    if isinstance(value, str):
        text = value.strip()
        if not text:
            raise ValueError(f"{name} is empty")
    else:
        given: Any = value  # numbers.Real has no order that mypy knows
        if 0 < given < 1:
            raise ValueError(f'{name} is a number of bytes, got {value!r}: budget and activation_budget take shares as text, such as "60%"')
        text = f"{value if isinstance(value, int) else float(value):.0f}"
    try:
        parse(text)
    except Error as e:
        raise Error(f"{name}: {e}") from None
    return text


def of_solver(options: Any) -> dict[str, str]:
    """Converts options of a solver to texts. Raises TypeError unless `options` maps names to numbers or bools."""
    if not isinstance(options, Mapping):
        raise TypeError(f'solver_options must be a mapping such as {{"saved": 2}}, got {options!r}')
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, (bool, numbers.Real)):
            raise TypeError(f"solver_options: {name!r} must be a name with a number, True or False, got {value!r}")
    return {name: str(value).lower() if isinstance(value, bool) else f"{value}" for name, value in sorted(options.items())}


def folder(name: str, value: Any) -> str:
    """Converts a folder to an absolute path, which does not depend on the working directory. Raises TypeError or ValueError."""
    try:
        text = os.fsdecode(value)
    except TypeError:
        raise TypeError(f"{name} must be a folder, got {value!r}") from None
    if not text or "\0" in text:
        raise ValueError(f"{name} must be a folder, got {text!r}")
    return os.path.abspath(text)


def number(name: str, value: Any, kind: Any = numbers.Real, minimum: int = 0, maximum: float = math.inf) -> None:
    """Raises TypeError or ValueError unless `value` is a number of type `kind` in [minimum, maximum]."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {'an integer' if kind is numbers.Integral else 'a number'}, got {value!r}")
    if not value >= minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value!r}")
    if value > maximum:
        raise ValueError(f"{name} must be <= {maximum}, got {value!r}")


def document(name: str, value: Any) -> str:
    """Converts a document of an exchange format from a dictionary to JSON. Raises TypeError for anything else."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dictionary, got {type(value).__qualname__}")
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError) as e:
        raise TypeError(f"{name}: {e}") from None


def function(name: str, value: Any) -> None:
    """Raises TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")


def arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a step, as tuple and dict. Raises TypeError."""
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of what a step is called with, got {type(args).__qualname__}: a single argument is (x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a mapping of names to what a step is called with, got {type(kwargs).__qualname__}")
    return tuple(args), dict(kwargs or {})
