# SPDX-License-Identifier: Apache-2.0
"""The sessions of all wrapped models."""

import atexit
import sys
import types
import weakref
from typing import Any

from ._model_entries import METHODS

sessions: "weakref.WeakSet[Any]" = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Ends searches beside the steps before the interpreter ends."""
    for session in list(sessions):
        try:
            session.close()
        except Exception:  # nobody is left to tell; the other sessions must end, too
            pass


def free_unreferenced_models() -> None:
    """Frees models that are referenced only by the methods that `wrap` has put into them, with their weights and arenas. Otherwise these cycles
    would stay until Python's next garbage collection, beside the next model of a search over many models."""
    probe = object()
    held_here = sys.getrefcount(probe)
    probes = {"": object()}
    held_in_dict = sys.getrefcount(probes[""])
    for session in list(sessions):
        model = session._source._model()
        if model is None:
            continue
        members = model.__dict__
        own = [name for name in METHODS if isinstance(members.get(name), types.MethodType) and members[name].__self__ is model]
        if sys.getrefcount(model) == held_here + len(own) and all(sys.getrefcount(members[name]) == held_in_dict for name in own):
            for name in own:
                del members[name]
