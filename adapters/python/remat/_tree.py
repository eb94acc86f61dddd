# SPDX-License-Identifier: Apache-2.0
"""Splits arguments and results into a list of tensors, and a form that holds everything else."""

from __future__ import annotations

import collections
import collections.abc
import enum
import types
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from ._errors import Refused

#: Types whose values are identified by type and text.
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, torch.dtype, torch.device,
                    torch.layout, torch.memory_format, torch.Size})
_DEFINED_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Leaf(NamedTuple):
    """A constant that is no tensor."""

    value: Any


class Node(NamedTuple):
    """A container: `make(children)` builds it again."""

    make: Any
    children: list[Any]


#: Parts of the text of a structure that stand for tensors and containers.
_STRUCTURE = frozenset("T{}[]()")


class _Tensor:
    """Placeholder of a tensor in a form."""


TENSOR = _Tensor()


def constant(value: Any) -> str | None:
    """A text that identifies a constant: values with equal texts behave alike. None if `value` is no constant."""
    kind: Any = type(value)
    if kind in PLAIN:
        return f"{kind.__name__} {value!r}"
    if isinstance(value, enum.Enum):
        return f"{kind.__module__}.{kind.__qualname__} {value.name}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__} {id(value)}" if "<locals>" not in value.__qualname__ else None
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and getattr(value, "shape", None) == () and kind.__name__ != "ndarray":
        return f"numpy {value.dtype} {value!r}"
    if isinstance(value, (int, float, str)) and kind.__reduce_ex__ is object.__reduce_ex__:
        return f"{kind.__module__}.{kind.__qualname__} {value!r}"
    return None


def flatten(value: Any, what: str, values: bool = True) -> tuple[list[torch.Tensor], Any, str]:
    """Splits a structure into tensors and form.

    what: name of the structure in messages, such as "argument x".
    values: True includes constants in the text; False includes only tensors and containers.
    Returns the tensors, the form (see `unflatten`), and a text. The text is equal for structures that differ only in their tensors.
    Raises Refused naming a part that is neither a tensor nor a constant.
    """
    tensors: list[torch.Tensor] = []
    key: list[str] = []
    form = _flatten(value, what, tensors, key, set())
    return tensors, form, "".join(key) if values else "".join(part for part in key if part in _STRUCTURE)


def _flatten(value: Any, what: str, tensors: list[torch.Tensor], key: list[str], inside: set[int]) -> Any:
    kind = type(value)
    if kind in _TENSORS:
        if value.layout is not torch.strided or value.is_quantized:
            raise Refused(f"{what} is a tensor that is sparse, nested or quantized: a plan is made for plain tensors",
                          advice="pass plain tensors, or leave this call out with remat.of(model).paused()")
        tensors.append(value)
        key.append("T")
        return TENSOR
    if kind in PLAIN:
        key.append(f"{kind.__name__}{value!r},")
        return Leaf(value)
    if isinstance(value, torch.Tensor):
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or kind.__torch_function__ is not torch.Tensor.__torch_function__:
            raise Refused(f"{what} is a {kind.__module__}.{kind.__qualname__}: a plan is made for plain tensors",
                          advice="pass a plain tensor, or leave this call out with remat.of(model).paused()")
        tensors.append(value)
        key.append("T")
        return TENSOR
    if id(value) in inside:
        raise Refused(f"{what} contains itself")
    inside.add(id(value))
    try:
        return _flatten_container(value, kind, what, tensors, key, inside)
    finally:
        inside.discard(id(value))


def _flatten_container(value: Any, kind: Any, what: str, tensors: list[torch.Tensor], key: list[str], inside: set[int]) -> Any:
    if kind is dict:
        key.append("{")
        for name in value:
            text = constant(name)
            if text is None:
                raise Refused(f"a key of {what} is a {type(name).__qualname__}: no plan can be told by it")
            key.append(text + ":")
        names = list(value)
        children = [_flatten(value[name], f"{what}[{name!r}]", tensors, key, inside) for name in names]
        key.append("}")
        return Node(lambda items: dict(zip(names, items)), children)
    if kind is list or kind is tuple:
        key.append("[" if kind is list else "(")
        children = [_flatten(item, f"{what}[{i}]", tensors, key, inside) for i, item in enumerate(value)]
        key.append("]")
        return Node(kind, children)
    text = constant(value)
    if text is not None:
        key.append(text + ",")
        return Leaf(value)
    known = pytree.SUPPORTED_NODES.get(kind)
    if known is None and pytree.is_namedtuple_instance(value):
        known = pytree.SUPPORTED_NODES[collections.namedtuple]  # type: ignore[index]
    if known is not None:
        items, context = known.flatten_fn(value)
        held, form, text = flatten(context, f"what {what} keeps beside its items")
        if held:
            raise Refused(f"{what} keeps tensors beside its items")
        key.append(f"{kind.__module__}.{kind.__qualname__}<{text}>(")
        children = [_flatten(item, f"{what}[{i}]", tensors, key, inside) for i, item in enumerate(items)]
        key.append(")")
        return Node(lambda items: known.unflatten_fn(items, context), children)
    state = attributes(value)
    if state is None:
        raise Refused(f"{what} is a {kind.__module__}.{kind.__qualname__}: neither a tensor nor something told by its value",
                      advice="pass tensors and plain values, or leave this call out with remat.of(model).paused()")
    key.append(f"{kind.__module__}.{kind.__qualname__}{{")
    names = list(state)
    children = []
    for name in names:
        key.append(name + ":")
        children.append(_flatten(state[name], f"{what}.{name}", tensors, key, inside))
    key.append("}")

    def make(items: Any) -> Any:
        made = kind.__new__(kind)
        for name, item in zip(names, items):
            object.__setattr__(made, name, item)
        return made

    return Node(make, children)


def tensors_in(value: Any, depth: int = 8) -> list[torch.Tensor]:
    """All tensors in a structure of any kind: in containers, and among attributes. A tensor in several places is listed several times."""
    found: list[torch.Tensor] = []
    _find(value, depth, found, set())
    return found


def _find(value: Any, depth: int, found: list[torch.Tensor], inside: set[int]) -> None:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    if depth == 0 or kind in PLAIN or isinstance(value, (type, types.FunctionType, torch.nn.Module)) or id(value) in inside:
        return
    if isinstance(value, collections.abc.Mapping):
        parts: Any = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        parts = value
    elif (known := pytree.SUPPORTED_NODES.get(kind)) is not None:
        parts = known.flatten_fn(value)[0]
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    inside.add(id(value))
    for part in parts:
        _find(part, depth - 1, found, inside)
    inside.discard(id(value))


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that can be rebuilt from them alone; None for other objects."""
    kind: Any = type(value)
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return None
    if kind.__getstate__ is not object.__getstate__ or hasattr(kind, "__setstate__") or kind.__new__ is not object.__new__:
        return None
    if any(base is not object and not base.__flags__ & _DEFINED_IN_PYTHON for base in kind.__mro__):
        return None
    state = dict(getattr(value, "__dict__", {}))
    for base in kind.__mro__:
        for name in (slots if not isinstance(slots := base.__dict__.get("__slots__", ()), str) else (slots,)):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                state[name] = getattr(value, name)
    if not state and not hasattr(value, "__dict__"):
        return None
    return state


def unflatten(form: Any, tensors: Any) -> Any:
    """Builds the structure of `form` with the tensors of an iterator."""
    if form is TENSOR:
        return next(tensors)
    if type(form) is Leaf:
        return form.value
    return form.make([unflatten(child, tensors) for child in form.children])
