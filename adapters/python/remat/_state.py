# SPDX-License-Identifier: Apache-2.0
"""Attributes of modules: what a forward may depend on beside its tensors."""

from __future__ import annotations

import collections
import enum
import itertools
import random
import types
from typing import Any

import torch

try:  # now: its first import, in the middle of a forward, would look like a draw
    from numpy import random as numpy_random
except ImportError:
    numpy_random = None

from . import _torch
from ._tree import PLAIN, attributes, constant

#: Of `Module.__dict__`: what PyTorch keeps there. Parameters, buffers and modules are seen by themselves; hooks as `describe_hooks`.
_OWN = frozenset(set(torch.nn.Module().__dict__) - {"training"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set, collections.OrderedDict)
_DEPTH = 6
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_LISTS = ("named_parameters", "named_buffers", "named_modules", "_named_members")  #: of `Module`: what its tensors are found by
_SKIP = frozenset({"_remat", "_trainer", "_fabric"})


def describe_hooks(model: torch.nn.Module) -> str:
    """Names of the modules inside `model` that have hooks; empty if none has."""
    found = [name for name, module in model.named_modules()
             if module is not model and any(module.__dict__.get(hooks) for hooks in _HOOKS)]
    return ", ".join(found)


class Record:
    """The objects that a text was read from. While all of them are as they were, so is the text.

    A value that may be another one without becoming another object is read again each time. What the record holds is kept alive:
    so it belongs to the session, where the garbage collector sees it.
    """

    __slots__ = ("complete", "types", "states", "dicts", "orders", "tensors", "texts")

    def __init__(self):
        self.complete = True  #: else nothing is known to be as it was
        self.types: list[tuple] = []  #: object, type
        self.states: list[tuple] = []  #: object, `__dict__`
        self.dicts: list[tuple] = []  #: dict, key, value, key, value, ...
        self.orders: list[tuple] = []  #: list, set or ordered dict, what iterating over it gives ...
        self.tensors: list[tuple] = []  #: tensor, dtype, device, shape, requires_grad
        self.texts: list[tuple] = []  #: object, depth, text

    def holds(self) -> bool:
        """Is everything as it was?"""
        return (self.complete and _torch.unchanged(self.types, self.states, self.dicts, self.orders, self.tensors)
                and all(_describe(value, set(), depth, Record()) == text for value, depth, text in self.texts))

    def add_module(self, module: torch.nn.Module, root: bool) -> None:
        """Parameters, buffers, modules and attributes, and hooks where it is not the root."""
        self.types.append((module, type(module)))
        held = [table for name in (_TABLES if root else _TABLES + _HOOKS) if (table := module.__dict__.get(name)) is not None]
        lists = all(getattr(type(module), name) is getattr(torch.nn.Module, name) and name not in module.__dict__ for name in _LISTS)
        self.complete = self.complete and lists and self._add_state(module) and all(map(self.add_dict, held))

    def _add_state(self, value: Any) -> bool:
        held = _torch.state_of(value)
        if held is None or held is not value.__dict__:
            return False
        self.states.append((value, held))
        return self.add_dict(held)

    def add_dict(self, held: Any) -> bool:
        """False: its entries cannot be compared one by one."""
        if type(held) not in _DICTS or not all(map(_immutable, held)):
            return False
        self.dicts.append((held, *itertools.chain.from_iterable(dict.items(held))))
        if type(held) is collections.OrderedDict and len(held) > 1:
            self.orders.append((held, *held))
        return True

    def add_object(self, value: Any, state: dict[str, Any]) -> bool:
        """An object that is nothing but its attributes. False: they cannot be compared one by one."""
        owner = value.__func__ if type(value) is types.MethodType else value
        return len(state) == len(getattr(value, "__dict__", ())) and self._add_state(owner)

    def add_sequence(self, value: Any) -> bool:
        """A list, tuple or set. False: its items cannot be compared one by one."""
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                if type(value).__iter__ is not kind.__iter__ or (kind in (set, frozenset) and not all(map(_immutable, value))):
                    return False
                if kind in (list, set):
                    self.orders.append((value, *value))
                return True
        return False


class Attributes:
    """Reads the attributes of a model's modules."""

    def text(self, model: torch.nn.Module, record: Record) -> str:
        """Equal texts: the same modules with the same attributes and hooks."""
        return repr(self._all(model, record))

    def _all(self, model: torch.nn.Module, record: Record) -> dict[str, str]:
        found: dict[str, str] = {}
        seen: set[int] = set()
        for path, module in model.named_modules(remove_duplicate=False):
            found[path] = f"{type(module).__qualname__} {id(module)}"
            if id(module) in seen:
                continue
            seen.add(id(module))
            record.add_module(module, module is model)
            for name, value in module.__dict__.items():
                if name in _OWN or name in _SKIP or (name == "forward" and module is model):
                    continue
                found[f"{path}.{name}" if path else name] = _describe(value, seen, _DEPTH, record)
            if module is not model:
                for hooks in _HOOKS:
                    if module.__dict__.get(hooks):
                        found[f"{path}.{hooks}"] = repr([id(h) for h in module.__dict__[hooks].values()])
        return found

    def snapshot(self, model: torch.nn.Module) -> tuple[dict[str, str], list, list]:
        """What `changes` and `restore` compare with."""
        kept = []
        generators = []
        for module in model.modules():
            generators += [g for value in module.__dict__.values() if (g := _generator(value))]
            kept.append((module.__dict__, {k: (v, _copied(v)) for k, v in module.__dict__.items()}))
        return self._all(model, Record()), kept, generators

    def changes(self, model: torch.nn.Module, before: Any) -> list[str]:
        """Names of the attributes that are not as they were."""
        now = self._all(model, Record())
        return sorted(name for name in now.keys() | before[0].keys() if now.get(name) != before[0].get(name))

    def restore(self, model: torch.nn.Module, before: Any) -> None:
        """Puts attributes and hooks back."""
        for put, state in before[2]:
            put(state)
        for held, values in before[1]:
            for name in [n for n in held if n not in values]:
                del held[name]
            for name, (value, contents) in values.items():
                held[name] = value
                if type(value) in _CONTAINERS:
                    value.clear()
                    value.extend(contents) if type(value) is list else value.update(contents)


class Draws:
    """The generators of Python and numpy, as they are now."""

    def __init__(self):
        self._python = random.getstate()
        self._numpy = numpy_random.get_state() if numpy_random else None

    def happened(self) -> bool:
        """Has anything been drawn since?"""
        return self._told() != Draws()._told()

    def _told(self) -> tuple:
        return self._python, self._numpy and (self._numpy[1].tobytes(), *self._numpy[2:])

    def undo(self) -> None:
        """Puts them back."""
        random.setstate(self._python)
        if self._numpy is not None:
            numpy_random.set_state(self._numpy)


def _generator(value: Any) -> tuple[Any, Any] | None:
    """How to set the state of a generator of Python or numpy, and that state; None for anything else."""
    if isinstance(value, random.Random):
        return value.setstate, value.getstate()
    if type(value).__module__.startswith("numpy.random"):
        bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", value))
        if hasattr(bits, "state"):
            return lambda state: setattr(bits, "state", state), bits.state
    return None


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in _CONTAINERS else value


def _immutable(value: Any) -> bool:
    """What `constant` tells of it stays the same as long as it is the same object."""
    return (type(value) in PLAIN and type(value) is not slice) or isinstance(value, (enum.Enum, type, types.FunctionType, types.BuiltinFunctionType))


def _describe(value: Any, seen: set[int], depth: int, record: Record) -> str:
    """A text of what a module holds, as far as it can be told."""
    text, recorded = _read(value, seen, depth, record)
    if not recorded:
        record.texts.append((value, depth, _read(value, set(), depth, Record())[0]))
    return text


def _read(value: Any, seen: set[int], depth: int, record: Record) -> tuple[str, bool]:
    """The text, and whether the record tells when it changes."""
    text = constant(value)
    if text is not None:
        return text, _immutable(value)
    kind = type(value)
    record.types.append((value, kind))
    if isinstance(value, torch.Tensor):
        told = value.dtype, value.device, tuple(value.shape), value.requires_grad
        record.tensors.append((value, *told))
        return f"tensor {id(value)} {' '.join(map(str, told))}", kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    generator = _generator(value)
    if generator is not None:
        return f"{kind.__qualname__} {id(value)} {generator[1]!r}", False
    if isinstance(value, torch.nn.Module) or depth == 0 or id(value) in seen:
        return f"{kind.__qualname__} {id(value)}", True
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
        told = ", ".join(_describe(v, seen, depth - 1, record) for v in items)
        return f"{kind.__qualname__} [{told}]", record.add_sequence(value)
    if isinstance(value, dict):
        told = ", ".join(f"{constant(k)}: {_describe(v, seen, depth - 1, record)}" for k, v in value.items())
        return f"{kind.__qualname__} {{{told}}}", record.add_dict(value)
    state = attributes(value)
    if state is None:
        state = getattr(value, "__dict__", None)
    if not isinstance(state, dict):
        return f"{kind.__qualname__} {id(value)}", True
    seen.add(id(value))
    told = ", ".join(f"{k}: {_describe(v, seen, depth - 1, record)}" for k, v in state.items())
    return f"{kind.__qualname__} {id(value)} {{{told}}}", record.add_object(value, state)
