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
    """Per dict of parameters, buffers and modules, and of attributes and hooks: itself, and what it holds."""
    names = ("_parameters", "_buffers", "_modules", *(_snapshot.HOOKS if attributes else ()))
    held = [part.__dict__.get(name) for part in model.modules() for name in names]
    held += [part.__dict__ for part in model.modules() if attributes]
    return [(d, *itertools.chain.from_iterable(d.items())) for d in held if isinstance(d, dict)]


class Source:
    """The model as the planner sees it."""

    def __init__(self, model: torch.nn.Module, session: Session):
        self._model = weakref.ref(model)
        self._session = weakref.ref(session)

    def model(self) -> torch.nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("the wrapped model is gone")
        return model

    def planned_by(self) -> weakref.ref[Any] | None:
        """The function that plans the forward of the model; None if none does yet."""
        session = self._session()
        return None if session is None or session._forward is None else weakref.ref(session._forward)

    def plain(self, planned_by: weakref.ref[Any] | None) -> Any:
        """The forward of the model as it was for a step that this function has planned."""
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
        followed = session is not None and session._options.followed()  # calls of the forward are compared
        if session is not None and session._source is self:
            session._members = _members(model, not followed)
            if not followed:
                session._tell_hooks(model)
            if session._gradients is not None and session._open:
                session._gradients.attach(model)  # what is trained since
        return "" if followed else _snapshot.settings(model)

    def changed(self) -> bool:
        """May anything be other than it was when `signature` was last asked for?"""
        session = self._session()
        return session is None or session._source is not self or not _torch.same_dicts(session._members)

    def put_back(self) -> None:
        """Weights and buffers go back to where the options want them."""
        session = self._session()
        if session is not None:
            session._place_weights(self.model())
