# SPDX-License-Identifier: Apache-2.0
"""Attributes of modules: what a forward may depend on beside its tensors."""

from __future__ import annotations

import collections
import random
import sys
from typing import Any

import torch

from ._tree import attributes, constant

#: Of `Module.__dict__`: what PyTorch keeps there. Parameters, buffers and modules are seen by themselves; hooks as `describe_hooks`.
_OWN = frozenset(set(torch.nn.Module().__dict__) - {"training"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (list, dict, set, collections.OrderedDict)
_DEPTH = 6
_SKIP = frozenset({"_remat", "_trainer", "_fabric"})


def describe_hooks(model: torch.nn.Module) -> str:
    """Names of the modules inside `model` that have hooks; empty if none has."""
    found = [name for name, module in model.named_modules()
             if module is not model and any(module.__dict__.get(hooks) for hooks in _HOOKS)]
    return ", ".join(found)


class Attributes:
    """Reads the attributes of a model's modules."""

    def text(self, model: torch.nn.Module) -> str:
        """Equal texts: the same modules with the same attributes and hooks."""
        return repr(self._all(model))

    def _all(self, model: torch.nn.Module) -> dict[str, str]:
        found: dict[str, str] = {}
        seen: set[int] = set()
        for path, module in model.named_modules(remove_duplicate=False):
            found[path] = f"{type(module).__qualname__} {id(module)}"
            if id(module) in seen:
                continue
            seen.add(id(module))
            for name, value in module.__dict__.items():
                if name in _OWN or name in _SKIP or (name == "forward" and module is model):
                    continue
                text = _describe(value, seen, _DEPTH)
                if text is not None:
                    found[f"{path}.{name}" if path else name] = text
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
        return self._all(model), kept, generators

    def changes(self, model: torch.nn.Module, before: Any) -> list[str]:
        """Names of the attributes that are not as they were."""
        now = self._all(model)
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
        numpy = sys.modules.get("numpy.random")
        self._python = random.getstate()
        self._numpy = numpy.get_state() if numpy is not None else None

    def happened(self) -> bool:
        """Has anything been drawn since?"""
        return self._told() != Draws()._told()

    def _told(self) -> tuple:
        return self._python, self._numpy and (self._numpy[1].tobytes(), *self._numpy[2:])

    def undo(self) -> None:
        """Puts them back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


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


def _describe(value: Any, seen: set[int], depth: int) -> str | None:
    """A text of what a module holds, as far as it can be told, or None."""
    text = constant(value)
    if text is not None:
        return text
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {id(value)} {value.dtype} {value.device} {tuple(value.shape)} {value.requires_grad}"
    generator = _generator(value)
    if generator is not None:
        return f"{kind.__qualname__} {id(value)} {generator[1]!r}"
    if isinstance(value, torch.nn.Module) or depth == 0 or id(value) in seen:
        return f"{kind.__qualname__} {id(value)}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
        return f"{kind.__qualname__} [{', '.join(str(_describe(v, seen, depth - 1)) for v in items)}]"
    if isinstance(value, dict):
        return f"{kind.__qualname__} {{{', '.join(f'{constant(k)}: {_describe(v, seen, depth - 1)}' for k, v in value.items())}}}"
    state = attributes(value)
    if state is None:
        state = getattr(value, "__dict__", None)
    if not isinstance(state, dict):
        return f"{kind.__qualname__} {id(value)}"
    seen.add(id(value))
    told = ", ".join(f"{k}: {_describe(v, seen, depth - 1)}" for k, v in state.items())
    return f"{kind.__qualname__} {id(value)} {{{told}}}"
