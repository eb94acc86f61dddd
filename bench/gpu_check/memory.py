# SPDX-License-Identifier: Apache-2.0
"""The part `memory`: compares the planned peak with the measured peak, and with the memory that PyTorch's allocator reserves."""

from __future__ import annotations

import torch
from context import Context
from models import models
from report import FAILED, PASSED, size

import remat

BUDGETS = ("100% of activations", "60% of activations")
ROUNDING = 22 << 20  #: bytes by which CUDA's caching allocator may round a step up: a segment of 2 MiB and one of 20 MiB


def cases(tiny: bool) -> list[str]:
    return [name for name in models(tiny) if name in ("GPT with dropout", "Llama-like", "ResNet", "U-Net")]


def run(c: Context, name: str) -> None:
    for budget in BUDGETS:
        measure(c, name, budget)
        c.free()


def measure(c: Context, name: str, budget: str) -> None:
    make, sample, _ = models(c.tiny)[name]
    torch.manual_seed(1)
    model, batch = make().to(c.device), c.to_device(sample())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    what = budget
    try:
        remat.wrap(model, batch, budget=budget, **c.options())
    except remat.OverBudget as e:
        if not e.needed:
            raise
        what, smallest = f"{size(e.needed * 1.02)}, as {budget} is too little", int(e.needed * 1.02)
        remat.wrap(model, batch, budget=smallest, **c.options())
    session = remat.of(model)
    model(*batch).backward()  # the first step learns how the loss uses the outputs
    model.zero_grad(set_to_none=False)
    session.release()
    c.free()
    session.reset_peak()
    before, reserved_before = c.allocated(), torch.accelerator.memory_reserved()
    for _ in range(3):
        model(*batch).backward()
        model.zero_grad(set_to_none=False)
    c.synchronize()
    told = session.memory()
    step = told["planned"] - told["held"]
    reserved = c.reserved_peak() - reserved_before
    c.log.row(name, what, *within(told["peak"] <= told["budget"], "the measured peak is above the budget"), "peak <= budget", peak=size(told["peak"]),
              planned=size(told["planned"]), budget=size(told["budget"]), step=size(c.peak() - before))
    c.log.row(name, what, *within(reserved <= step + ROUNDING, f"the step reserves {size(reserved - step)} more than is planned"), "reserved = planned",
              step_reserves=size(reserved), step_planned=size(step), reserved_in_all=size(c.reserved_peak()))


def within(good: bool, cause: str) -> tuple[str, str]:
    return (PASSED, "") if good else (FAILED, cause)
