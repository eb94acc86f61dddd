# SPDX-License-Identifier: Apache-2.0
"""The device, the clock and the log of a process that runs cases."""

from __future__ import annotations

import contextlib
import gc
import os
import time

import emulated  # starts the device of REMAT_TEST_DEVICE
import torch
from report import Log


class Context:
    """Where cases run, and what they may take."""

    def __init__(self, log: Log, tiny: bool, seconds: float):
        self.log, self.tiny = log, tiny
        self.device = emulated.device
        self.emulated = emulated.is_emulated
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def autocast(self, on: bool = True):
        """bf16 for the kernels that gain by it."""
        return torch.autocast(self.device.type, torch.bfloat16) if on else contextlib.nullcontext()

    def has_bf16(self) -> bool:
        module = torch.get_device_module(self.device)
        return not hasattr(module, "is_bf16_supported") or module.is_bf16_supported()

    def to_device(self, inputs: tuple) -> tuple:
        return tuple(t.to(self.device) for t in inputs)

    def free(self) -> None:
        """Gives all that is unused back to the device, and starts the peaks anew."""
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
        """Verdict and cause of a goal about time."""
        if self.emulated:
            return "not judged", "emulated"
        return ("passed", "") if good else ("failed", "the goal is missed")

    def options(self) -> dict:
        """For `remat.wrap`: a limit for searches, so that parts end in time; and nothing runs unplanned in silence."""
        return {"time_limit": 1 if self.tiny else 6, "on_refuse": "raise"}


def deterministic() -> None:
    """Kernels that give the same bits each time, where PyTorch has them; it warns of the others."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def threads() -> None:
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
