# SPDX-License-Identifier: Apache-2.0
"""Snapshots of the state that a forward may change beside tensors: attributes of modules, generators of Python and numpy."""

from __future__ import annotations

import collections
import random
import types
from typing import Any, Iterable, Iterator

import torch

try:  # imported here, because its first import during a forward would look like a draw
    from numpy import random as numpy_random
except ImportError:
    numpy_random = None  # type: ignore[assignment]

from ._model_entries import SLOT
from ._tree import attributes, constant

#: Names in `Module.__dict__` that are no attributes of the user: names of PyTorch, hooks included, of this package and of trainers.
_OTHERS = frozenset(set(torch.nn.Module().__dict__) - {"training"} | {SLOT, "_trainer", "_fabric"})
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter)
_DEPTH = 6


def _own(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values of the attributes of all modules."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in _OTHERS and not (name == "forward" and module is model):
                yield f"{path}.{name}" if path else name, value


def settings(model: torch.nn.Module) -> str:
    """A text of the modules, of their attributes with plain values, and of which modules have hooks."""
    plain = [(name, text) for name, v in _own(model) if (text := constant(v)) is not None]
    return repr((hooked(model), [type(m).__qualname__ for m in model.modules()], plain))


def hooked(model: torch.nn.Module) -> str:
    """Names of the modules inside `model` that have hooks; an empty text if there are none."""
    return ", ".join(name for name, m in model.named_modules() if m is not model and any(m.__dict__.get(hooks) for hooks in HOOKS))


def fingerprints(model: torch.nn.Module) -> dict[str, Any]:
    """Fingerprints of the attributes of all modules, and of hooks of modules inside the model. A changed fingerprint shows a change."""
    seen: set[int] = set()
    by_name = {name: _fingerprint(value, seen, _DEPTH) for name, value in _own(model)}
    for path, module in model.named_modules():
        if module is not model:
            by_name |= {f"{path}.{h}": [id(f) for f in module.__dict__[h].values()] for h in HOOKS if module.__dict__.get(h)}
    return by_name


def _containers(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Lists the containers among `values`, and in each other, with copies of them."""
    found: dict[int, tuple[Any, Any]] = {}
    left = list(values)
    while left:
        value = left.pop()
        known = type(value) in _CONTAINERS
        if id(value) not in found and (known or isinstance(value, tuple)):
            found[id(value)] = value, value.copy() if known else None
            left.extend(value.values() if isinstance(value, dict) else value)
    return [pair for pair in found.values() if pair[1] is not None]


class Snapshot:
    """The attributes of all modules of a model, with the contents of containers, and the states of the generators of Python and numpy."""

    def __init__(self, model: torch.nn.Module):
        self._held = [(m.__dict__, m.__dict__.copy()) for m in model.modules()]
        values = [v for held, _ in self._held for v in held.values()]
        self._containers = _containers(values)
        self._generators = [g for v in values if (g := _generator(v))]
        self._python = random.getstate()
        self._numpy: Any = numpy_random and numpy_random.get_state()

    def drawn(self) -> bool:
        """True if the generators of Python or numpy have moved since."""
        now: Any = numpy_random and numpy_random.get_state()
        return random.getstate() != self._python or bool(now and (now[1].tobytes(), *now[2:]) != (self._numpy[1].tobytes(), *self._numpy[2:]))

    def restore(self) -> None:
        """Restores the attributes and the generators."""
        for put, state in self._generators:
            put(state)
        for held, values in self._held:
            for name in [n for n in held if n not in values]:
                del held[name]
            held.update(values)
        for container, contents in self._containers:
            container.clear()
            container.extend(contents) if isinstance(container, (list, collections.deque)) else container.update(contents)
        random.setstate(self._python)
        if numpy_random:
            numpy_random.set_state(self._numpy)


def _generator(value: Any) -> tuple[Any, Any] | None:
    """The setter and the state of a generator of Python or numpy; None for anything else."""
    if isinstance(value, random.Random):
        return value.setstate, value.getstate()
    if type(value).__module__.startswith("numpy.random"):
        bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", value))
        if hasattr(bits, "state"):
            return lambda state: setattr(bits, "state", state), bits.state
    return None


def _fingerprint(value: Any, seen: set[int], depth: int) -> Any:
    """Fingerprint of a value: stays equal while the value is unchanged. Changes deeper than `depth` are not seen."""
    if (text := constant(value)) is not None:
        return text
    if isinstance(value, torch.Tensor):
        return id(value), value.dtype, value.device, value.shape, value.requires_grad
    if (generator := _generator(value)) is not None:
        return id(value), repr(generator[1])
    if isinstance(value, torch.nn.Module) or depth == 0 or id(value) in seen:
        return id(value)
    if isinstance(value, (list, tuple)):
        return type(value), [_fingerprint(v, seen, depth - 1) for v in value]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, value))
    if isinstance(value, dict):
        return type(value), [(constant(k), _fingerprint(v, seen, depth - 1)) for k, v in value.items()]
    seen.add(id(value))
    state = attributes(value) or getattr(value.__func__ if type(value) is types.MethodType else value, "__dict__", None)
    return id(value), isinstance(state, dict) and [(k, _fingerprint(v, seen, depth - 1)) for k, v in state.items()]
