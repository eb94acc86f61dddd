# SPDX-License-Identifier: Apache-2.0
"""The sessions of all wrapped models."""

import atexit
import sys
import types
import weakref
from typing import Any

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
    for session in list(sessions):
        model = session._source._model()
        if model is None:
            continue
        own = [name for name, value in model.__dict__.items() if isinstance(value, types.MethodType) and value.__self__ is model]
        if sys.getrefcount(model) == held_here + len(own):
            for name in own:
                del model.__dict__[name]
