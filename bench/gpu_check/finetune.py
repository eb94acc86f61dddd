# SPDX-License-Identifier: Apache-2.0
"""The part `finetune`: trains all parameters of a model with AdamW, in far less memory than its weights, gradients and states.

The contestant is offloading written by hand. Peaks do not count memory that was held before the model was made, because libraries keep
their workspaces from one training to the next.
"""

from __future__ import annotations

import statistics
import time

import torch
from context import Context
from models import llama_3b
from report import FAILED, NOT_AVAILABLE, TOLD, cause_of, size
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import remat

CASE = "Llama 3 B"
HAND, OURS = "offloading by hand", 'remat, offload="all"'
GOAL = "peak <= limit, faster than by hand"


def cases(tiny: bool) -> list[str]:
    return [CASE]


def draw(c: Context, pinned: bool) -> tuple[torch.nn.Module, tuple]:
    """The model on the host, with weights that depend only on the seed, and its inputs on the device."""
    make, sample = llama_3b(c.tiny)
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for p in model.parameters():
        values = torch.ones(p.shape) if p.dim() == 1 else (torch.randn(p.shape, device=c.device) * 0.02).cpu()
        p.data = values.pin_memory() if pinned else values
    return model, c.to_device(sample())


def by_hand(c: Context, module: torch.nn.Module) -> None:
    """Copies weights of `module` to the device for its forward, and again for the recomputation in its backward. Gradients go to the host."""
    plain = module.forward

    def forward(*args):
        def on_device(*args):
            weights = {name: p.to(c.device, non_blocking=True) for name, p in module.named_parameters()}
            module.forward = plain
            try:
                return functional_call(module, weights, args)
            finally:
                module.forward = forward

        return checkpoint(on_device, *args, use_reentrant=False)

    module.forward = forward


def train(c: Context, model: torch.nn.Module, inputs: tuple, optimizer: torch.optim.Optimizer, context) -> tuple[list[float], float]:
    """Returns the losses and the seconds of a step."""
    losses, times = [], []
    for k in range(3):
        c.synchronize()
        begin = time.perf_counter()
        with context(), c.autocast(not c.tiny):
            loss = model(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        c.synchronize()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
        if k and c.left() < 1.5 * times[-1]:
            break
    return losses, statistics.median(times[1:])


def run(c: Context, case: str) -> None:
    held = c.allocated()
    try:
        model, inputs = draw(c, pinned=True)
    except RuntimeError as e:
        return c.log.row(case, HAND, NOT_AVAILABLE, cause_of(e))
    state = 4 * sum(p.nbytes for p in model.parameters())  # weights, gradients, two states
    limit = state if c.tiny else state // 4
    hand = hand_made(c, case, model, inputs, limit, held)
    del model, inputs
    c.free()
    held = c.allocated()
    try:
        model, inputs = draw(c, pinned=False)
        model.to(c.device)
        remat.wrap(model, budget=limit, **c.options(), offload="all", host_budget=2 * state)
        optimizer = remat.optimizer(model.parameters(), torch.optim.AdamW, model=model, lr=1e-4)
        c.free()
        losses, seconds = train(c, model, inputs, optimizer, torch.enable_grad)
    except (ValueError, TypeError, remat.Error) as e:
        return c.log.row(case, OURS, NOT_AVAILABLE, cause_of(e), GOAL, limit=size(limit))
    peak = c.peak() - held
    figures = {"ms": f"{1e3 * seconds:.1f}", "peak": size(peak), "limit": size(limit), "loss": f"{losses[0]:.5f} .. {losses[-1]:.5f}"}
    if hand is not None:
        figures["of_by_hand"] = f"{seconds / hand:.3f}"
    verdict = c.verdict_of_time(hand is None or seconds < hand)
    if peak > limit:
        verdict = FAILED, f"the measured peak is {size(peak - limit)} above the limit"
    c.log.row(case, OURS, *verdict, GOAL, **figures)


def hand_made(c: Context, case: str, model: torch.nn.Module, inputs: tuple, limit: int, held: int) -> float | None:
    """Seconds of a step with offloading by hand; None if the training fails."""
    for module in (model.tokens, *model.blocks, model.norm, model.head):
        by_hand(c, module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    c.free()
    try:
        losses, seconds = train(c, model, inputs, optimizer, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))
    except torch.OutOfMemoryError as e:
        c.log.row(case, HAND, NOT_AVAILABLE, cause_of(e))
        return None
    c.log.row(case, HAND, TOLD, ms=f"{1e3 * seconds:.1f}", peak=size(c.peak() - held), limit=size(limit), loss=f"{losses[0]:.5f} .. {losses[-1]:.5f}")
    return seconds
