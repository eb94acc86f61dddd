# SPDX-License-Identifier: Apache-2.0
"""A wrapped model as the planner sees it."""

from __future__ import annotations

import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from . import _snapshot, _torch
from ._errors import Error

if TYPE_CHECKING:
    from ._session import Session


def _members(model: torch.nn.Module, attributes: bool) -> list[tuple[Any, ...]]:
    """Lists the dicts of parameters, buffers and modules, each with its keys and values; with `attributes` also those of attributes and hooks."""
    names = ("_parameters", "_buffers", "_modules", *(_snapshot.HOOKS if attributes else ()))
    held = [part.__dict__.get(name) for part in model.modules() for name in names]
    held += [part.__dict__ for part in model.modules() if attributes]
    return [(d, *itertools.chain.from_iterable(d.items())) for d in held if isinstance(d, dict)]


class Source:
    """Implements `remat::pytorch::model` for a module of Python. Holds the model and its session weakly."""

    def __init__(self, model: torch.nn.Module, session: Session):
        self._model = weakref.ref(model)
        self._session = weakref.ref(session)

    def model(self) -> torch.nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("the wrapped model is gone")
        return model

    def planned_by(self) -> weakref.ref[Any] | None:
        """The function that plans the forward of the model; None before the first one."""
        session = self._session()
        return None if session is None or session._forward is None else weakref.ref(session._forward)

    def plain(self, planned_by: weakref.ref[Any] | None) -> Any:
        """The original forward for a step that was planned by the function `planned_by`."""
        session, model = self._session(), self.model()
        function = planned_by and planned_by()
        if planned_by and function is None:
            raise Error("this step cannot run once more: the model has got another forward since")
        return types.MethodType(type(model).forward, model) if session is None else session._plain(model, function)

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model().named_parameters(remove_duplicate=False))

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model().named_buffers(remove_duplicate=False))

    def signature(self) -> str:
        model, session = self.model(), self._session()
        followed = session is not None and session._options.follows()  # then each step compares the calls of the forward with the recorded ones
        if session is not None and session._source is self:
            session._members = _members(model, not followed)
            if not followed:
                session._tell_hooks(model)
            if session._gradients is not None and session._open:
                session._gradients.attach(model)  # parameters that have become trainable
        return "" if followed else _snapshot.settings(model)

    def changed(self) -> bool:
        """False only if the dicts of the model are unchanged since the last call of `signature`."""
        session = self._session()
        return session is None or session._source is not self or not _torch.same_dicts(session._members)

    def put_back(self) -> None:
        """Moves weights and buffers back to the places that the options ask for."""
        session = self._session()
        if session is not None:
            session._place_weights(self.model())
