# SPDX-License-Identifier: Apache-2.0
"""The device, the clock and the log of a process that runs cases."""

from __future__ import annotations

import contextlib
import gc
import os
import time

import emulated  # the import starts the device of REMAT_TEST_DEVICE
import torch
from report import Log


class Context:
    """Device, time limit and log of the cases."""

    def __init__(self, log: Log, tiny: bool, seconds: float):
        self.log, self.tiny = log, tiny
        self.device = emulated.device
        self.emulated = emulated.is_emulated
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Remaining time, in seconds."""
        return self._end - time.monotonic()

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def autocast(self, on: bool = True):
        """A context of bf16 autocast if `on`; otherwise an empty context."""
        return torch.autocast(self.device.type, torch.bfloat16) if on else contextlib.nullcontext()

    def has_bf16(self) -> bool:
        module = torch.get_device_module(self.device)
        return not hasattr(module, "is_bf16_supported") or module.is_bf16_supported()

    def to_device(self, inputs: tuple) -> tuple:
        return tuple(t.to(self.device) for t in inputs)

    def free(self) -> None:
        """Frees unused memory of the device and resets its peaks."""
        gc.collect()
        if not torch.accelerator.is_available():
            return
        self.synchronize()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()

    def allocated(self) -> int:
        return torch.accelerator.memory_allocated()

    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated()

    def reserved_peak(self) -> int:
        return torch.accelerator.max_memory_reserved()

    def verdict_of_time(self, good: bool) -> tuple[str, str]:
        """(verdict, cause) of a goal about time. Emulated devices are not judged."""
        if self.emulated:
            return "not judged", "emulated"
        return ("passed", "") if good else ("failed", "the goal is missed")

    def options(self) -> dict:
        """Options of `remat.wrap`: short searches, which end at the first plan for tiny models, and an exception instead of a fallback."""
        return {**({"time_limit": 1, "gap": 0.9} if self.tiny else {"time_limit": 6}), "on_refuse": "raise"}


def deterministic() -> None:
    """Selects deterministic kernels. PyTorch warns about operators that have none."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def threads() -> None:
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
