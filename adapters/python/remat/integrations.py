# SPDX-License-Identifier: Apache-2.0
"""Callbacks for trainers that log the memory of wrapped models. Training works without them.

    from remat.integrations import LightningCallback, TrainerCallback

    Trainer(model, arguments, train_dataset=data, callbacks=[TrainerCallback()])           # Hugging Face
    lightning.Trainer(callbacks=[LightningCallback()])

Each callback logs `Session.memory()`, in bytes, beside the loss, as "remat/peak", "remat/to_disk" and so on. With several wrapped models the names are
"remat/NAME/peak", where NAME is the module path of the model. When training ends, the reports go to the logger "remat".
"""

from __future__ import annotations

from typing import Any

import logging

import torch

from ._wrap import is_wrapped, of

__all__ = ["LightningCallback", "TrainerCallback"]

_log = logging.getLogger("remat")


def _wrapped(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: m for name, m in model.named_modules() if is_wrapped(m)}


def _figures(model: torch.nn.Module) -> dict[str, float]:
    """The figures to log, in bytes, of models that have a plan."""
    found = _wrapped(model)
    return {f"remat/{name}/{key}" if len(found) > 1 else f"remat/{key}": float(value)
            for name, m in found.items() if of(m).plans for key, value in of(m).memory().items()}


def _tell(model: torch.nn.Module) -> None:
    for name, m in _wrapped(model).items():
        if of(m).plans:
            _log.info("%s\n%s", name or type(m).__name__, of(m).report())


def _of_trainer() -> type:
    import transformers

    class TrainerCallback(transformers.TrainerCallback):
        """For `transformers.Trainer`: adds figures to its log history and to its printed logs. Services named in `report_to` get the logs before this."""

        def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
            figures = _figures(model)
            if state.log_history:
                state.log_history[-1].update(figures)
            if logs is not None:
                logs.update(figures)

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            _tell(model)

    return TrainerCallback


def _of_lightning() -> type:
    try:
        import lightning.pytorch as lightning
    except ImportError:
        import pytorch_lightning as lightning  # type: ignore[no-redef]

    class LightningCallback(lightning.Callback):
        """For Lightning's `Trainer`: logs figures by `LightningModule.log_dict`, to all its loggers."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.log_dict(_figures(pl_module))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            _tell(pl_module)

    return LightningCallback


_MADE = {"TrainerCallback": _of_trainer, "LightningCallback": _of_lightning}  # made on first use, which imports the package of the trainer


def __getattr__(name: str) -> Any:
    if name not in _MADE:
        raise AttributeError(f"module 'remat.integrations' has no attribute {name!r}")
    found = globals()[name] = _MADE[name]()
    found.__module__, found.__qualname__ = __name__, name
    return found
