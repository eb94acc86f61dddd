# SPDX-License-Identifier: Apache-2.0
"""Exceptions of this package."""

from __future__ import annotations

from typing import Any

from ._core import Error as Error


class OverBudget(Error, RuntimeError):
    """No schedule is known that fits the budget.

    Its message contains " out of memory.": tools that search for a fitting batch size look for this text.
    """

    needed: int | None  #: smallest budget known to suffice, bytes
    bound: int  #: lower bound on every budget that suffices, bytes
    largest: str  #: operator with the largest working set

    def __init__(self, message: str, needed: int | None = None, bound: int = 0, largest: str = ""):
        super().__init__(message)
        self.needed, self.bound, self.largest = needed, bound, largest

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.needed, self.bound, self.largest)


class Refused(Error, RuntimeError):
    """The model, or this way to call it, cannot be planned: a plan would not compute the same as the model."""

    operator: str | None  #: operator of PyTorch that is refused, if any
    source: str | None  #: line of the model's source, "file:line, in function: text", if known
    advice: str | None  #: what to do

    def __init__(self, message: str, operator: str | None = None, source: str | None = None, advice: str | None = None):
        super().__init__(message)
        self.operator, self.source, self.advice = operator, source, advice

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.operator, self.source, self.advice)


class NotEqual(Error, RuntimeError):
    """A planned step gave other results than the plain step (`verify`)."""


class CopyFailed(Error, RuntimeError):
    """A copy out of the device's memory or back failed. Weights are unchanged, and the next step may run.

    If the step of an optimizer raises it, the message tells how many parameters have stepped. No step is possible until a saved state is loaded.
    """


class DeviceLost(Error, RuntimeError):
    """A device does not work any more. This process can run nothing on it; models on the host continue."""


class NoSpace(Error, RuntimeError):
    """A disk, or the `disk_budget`, has no room for weights, gradients or states of an optimizer. Weights are unchanged."""

    folder: str
    needed: int  #: requested bytes
    available: int  #: bytes left

    def __init__(self, reason: str, folder: str, needed: int, available: int):
        super().__init__(f"no room for {needed} bytes on the disk at {folder}, where {available} are left: {reason}")
        self.reason, self.folder, self.needed, self.available = reason, folder, needed, available

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.folder, self.needed, self.available)
