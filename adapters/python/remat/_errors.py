# SPDX-License-Identifier: Apache-2.0
"""What this package raises."""

from __future__ import annotations

from typing import Any

from ._core import Error as Error


class OverBudget(Error, RuntimeError):
    """No schedule is known that fits the budget.

    Its message contains " out of memory.", by which tools that look for a batch size that fits know it.
    """

    needed: int | None  #: smallest budget that is known to do, bytes
    bound: int  #: proven: no smaller one does, bytes
    largest: str  #: what takes most at the narrowest place

    def __init__(self, message: str, needed: int | None = None, bound: int = 0, largest: str = ""):
        super().__init__(message)
        self.needed, self.bound, self.largest = needed, bound, largest

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.needed, self.bound, self.largest)


class Refused(Error, RuntimeError):
    """The model, or this way to call it, cannot be planned: a plan would compute something else than the model."""

    operator: str | None  #: of PyTorch, where it is one that is refused
    source: str | None  #: line of the model's source, "file:line, in function: text", where there is one
    advice: str | None  #: what to do

    def __init__(self, message: str, operator: str | None = None, source: str | None = None, advice: str | None = None):
        super().__init__(message)
        self.operator, self.source, self.advice = operator, source, advice

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.operator, self.source, self.advice)


class NotEqual(Error, RuntimeError):
    """A planned step gave something else than the plain one (`verify`)."""


class CopyFailed(Error, RuntimeError):
    """A value could not be copied out of the device's memory or back. Weights are as they were, and the next step may run.

    Raised by the step of an optimizer, it says how many parameters have stepped, and no step follows before a checkpoint is loaded.
    """


class DeviceLost(Error, RuntimeError):
    """A device does not work any more. Nothing can run on it in this process; models on the host go on."""


class NoSpace(Error, RuntimeError):
    """A disk, or the `disk_budget`, has no room for weights or states of an optimizer. Weights are as they were."""

    folder: str
    needed: int  #: bytes that were asked for
    available: int  #: bytes that are left

    def __init__(self, reason: str, folder: str, needed: int, available: int):
        super().__init__(f"no room for {needed} bytes on the disk at {folder}, where {available} are left: {reason}")
        self.reason, self.folder, self.needed, self.available = reason, folder, needed, available

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.folder, self.needed, self.available)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came before there was a schedule to go on with."""
