# SPDX-License-Identifier: Apache-2.0
"""`python -m remat fit package.module:function`: will training fit?"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any, NoReturn, Sequence


class _Parser(argparse.ArgumentParser):
    """Raises ValueError with one sentence for bad arguments, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _share(text: str) -> float:
    """Parses a share: "10%" or "0.1". Raises ValueError."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def _made(target: str) -> Any:
    """Imports and calls the function `target`. Raises ValueError if it cannot be found, or raises."""
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"{target!r} does not name a function: write package.module:function")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"{target!r} cannot be imported: {e}") from None
    except (Exception, SystemExit) as e:
        raise ValueError(f"{target!r} cannot be imported, it raises {type(e).__name__}: {e}") from e
    try:
        return found()
    except (Exception, SystemExit) as e:
        raise ValueError(f"{target!r} raises {type(e).__name__}: {e}") from e


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0 if training fits, 3 if it does not, 2 for bad input."""
    parser = _Parser(prog="python -m remat", description="Will training fit into the memory of a device? The model does not run.")
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser("fit", help="tells what training takes", description="Tells what training takes on a device, and what recomputation would cost.")
    fit.add_argument("function", help="package.module:function, which returns a model and its arguments: (model, args) or (model, args, kwargs)")
    fit.add_argument("--device", help="name of a device, such as h100-sxm (default: the one at hand, which is measured)")
    fit.add_argument("--optimizer", help="class of torch.optim, such as adamw, or bytes of its states")
    fit.add_argument("--budget", help='bytes for training, such as "20 GiB" (default: the memory of the device)')
    fit.add_argument("--extra", default="10%", help="share of time that recomputation may cost (default: %(default)s)")
    fit.add_argument("--json", metavar="FILE", help="also write the answer to this file")
    commands.add_parser("devices", help="lists the devices with published numbers")
    try:
        given = parser.parse_args(words)
        return _fit(given) if given.command == "fit" else _devices()
    except (ValueError, TypeError, OSError, RuntimeError) as e:
        print(f"remat: {' '.join(str(e).split())}", file=sys.stderr)
        return 2


def _fit(given: argparse.Namespace) -> int:
    import torch

    from . import _core
    from ._errors import Error, Refused
    from ._fit import _arguments, fit

    if given.json:
        _core.require_writable(given.json)
    try:
        extra = _share(given.extra)
    except ValueError:
        raise ValueError(f'--extra must be a share such as "10%", got {given.extra!r}') from None
    made = _made(given.function)
    if not isinstance(made, (tuple, list)) or not made or not isinstance(made[0], torch.nn.Module):
        raise TypeError(f"{given.function} must return a model and its arguments, got {type(made).__qualname__}")
    args, kwargs = _arguments(made[1] if len(made) == 2 else tuple(made[1:]))
    try:
        found = fit(made[0], args, kwargs, device=given.device, optimizer=given.optimizer, budget=given.budget, extra=extra)
    except Refused as e:
        raise ValueError(f"the model that {given.function!r} returns cannot be planned: {e}") from e
    except (Error, ValueError):
        raise
    except Exception as e:  # raised by the model, for example because of its arguments
        raise ValueError(f"the model that {given.function!r} returns raises {type(e).__name__}: {e}") from e
    print(found)
    if given.json:
        found.save(given.json)
    return 0 if found.fits else 3


def _devices() -> int:
    from ._cards import card, cards

    for name in cards():
        it = card(name)
        print(f"{name:<16} {it.memory / 2**30:6.1f} GiB  {it.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
