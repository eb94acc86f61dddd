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
    """Searches beside the steps end before the interpreter does."""
    for session in list(sessions):
        session.close()


def let_go_dropped() -> None:
    """Models that nothing holds but the methods which `wrap` has put into them go, with their weights and arenas. Otherwise they would
    stay until Python collects garbage, beside the next model of a search over many."""
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
