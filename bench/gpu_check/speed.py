# SPDX-License-Identifier: Apache-2.0
"""The part `speed`: times of steps (forward and backward) relative to eager mode in the same run.

The memory limits are the peak of eager mode, the peak of checkpointing every block, and half of that. All contestants share one set of
parameters and gradients. They take turns; a turn has one step that is not timed, and then timed steps. A ratio is the median over turns
of (median time / median time of eager mode in the same turn). Peaks do not count bytes held at the start of a step.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
from context import Context
from report import FAILED, NOT_AVAILABLE, PASSED, TOLD, cause_of, lost, size
from step import checkpointed
from works import WORKS

import remat

EAGER, CHECKPOINT, COMPILE, OURS, GRAPH = "eager", "checkpoint per block", "torch.compile", "remat", "remat, graph=True"
FULL, PEAK, HALF = "full memory", "checkpoint's peak", "half of it"
TURNS, STEPS = 4, 5
FASTER = 0.94  #: goal at the peak of block checkpointing, relative to the time of block checkpointing
EVEN = 1.0  #: goal in the memory of eager mode, relative to the time of eager mode


class Contestant:
    def __init__(self, name: str, memory: str, model: torch.nn.Module):
        self.name, self.memory, self.model = name, memory, model
        self.peak, self.turns = 0, []

    def ratio(self, eager: Contestant) -> float:
        return statistics.median(a / b for a, b in zip(self.turns, eager.turns))


def cases(tiny: bool) -> list[str]:
    return list(WORKS)


def shared(model: torch.nn.Module) -> torch.nn.Module:
    """A copy with the parameters and buffers of `model`."""
    return copy.deepcopy(model, {id(t): t for t in [*model.parameters(), *model.buffers()]})


def step(c: Context, model: torch.nn.Module, inputs: tuple, half: bool) -> None:
    with c.autocast(half):
        loss = model(*inputs)
    loss.backward()


def zero(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.grad.zero_()


def peak(c: Context, model: torch.nn.Module, inputs: tuple, half: bool) -> int:
    """The largest peak of a few steps beyond the bytes held before, in bytes. remat releases kept memory before each step."""
    found = 0
    for _ in range(2 if c.tiny else 3):
        if remat.is_wrapped(model):
            remat.of(model).release()
        zero(model)
        c.free()
        before = c.allocated()
        step(c, model, inputs, half)
        c.synchronize()
        found = max(found, c.peak() - before)
    return found


def turn(c: Context, model: torch.nn.Module, inputs: tuple, half: bool) -> float:
    """Median seconds of a step."""
    times = []
    for k in range((1 if c.tiny else STEPS) + 1):
        zero(model)
        c.synchronize()
        begin = time.perf_counter()
        step(c, model, inputs, half)
        c.synchronize()
        if k:
            times.append(time.perf_counter() - begin)
    if remat.is_wrapped(model):
        remat.of(model).release()
    return statistics.median(times)


def wrapped(c: Context, model: torch.nn.Module, inputs: tuple, half: bool, budget: int | None, **options) -> torch.nn.Module:
    copied = shared(model)
    limits = {} if budget is None else {"activation_budget": budget}
    remat.wrap(copied, **limits, **c.options(), **options)
    step(c, copied, inputs, half)
    return copied


def compiled(c: Context, model: torch.nn.Module, inputs: tuple, half: bool, share: float) -> torch.nn.Module:
    from torch._functorch import config

    torch._dynamo.reset()
    with config.patch(activation_memory_budget=share):
        result = torch.compile(shared(model))
        step(c, result, inputs, half)
    return result


def candidates(c: Context, model: torch.nn.Module, inputs: tuple, half: bool, limits: dict[str, int]) -> list[tuple]:
    """The contestants of remat: (name, memory limit, function that makes the model)."""
    budgets = {memory: None if memory == FULL else limit for memory, limit in limits.items()}
    return [(who, memory, lambda b=budget, o=options: wrapped(c, model, inputs, half, b, **o))
            for who, options in ((OURS, {}), (GRAPH, {"graph": True})) for memory, budget in budgets.items()]


def run(c: Context, name: str) -> None:
    make, half = WORKS[name]
    half = half and c.has_bf16()
    torch.manual_seed(0)
    try:
        with torch.device("cpu" if c.emulated else c.device):  # drawing large weights is faster on the device
            model, inputs = make(c.tiny)
    except ImportError as e:
        return c.log.row(name, "all", NOT_AVAILABLE, f"{e}: pip install transformers torchvision")
    model, inputs = model.to(c.device), c.to_device(inputs)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    seconds = c.left() / (len(WORKS) - list(WORKS).index(name))
    end = time.monotonic() + seconds
    eager, block = Contestant(EAGER, FULL, model), Contestant(CHECKPOINT, PEAK, checkpointed(shared(model)))
    for who in (eager, block):
        try:
            who.peak = peak(c, who.model, inputs, half)
        except torch.OutOfMemoryError as e:
            return c.log.row(name, who.name, NOT_AVAILABLE, cause_of(e))
    limits = {FULL: eager.peak, PEAK: block.peak, HALF: block.peak // 2}

    def enter(whos: list[tuple], until: float) -> list[Contestant]:
        entered = []
        for who, memory, build in whos:
            try:
                if time.monotonic() > until:
                    raise TimeoutError("no time was left")
                made = Contestant(who, memory, build())
                made.peak = peak(c, made.model, inputs, half)
                entered.append(made)
            except Exception as e:
                cause = cause_of(e)
                fails = who == OURS and not isinstance(e, (remat.OverBudget, TimeoutError))
                c.log.row(name, f"{who}, {memory}", FAILED if fails else NOT_AVAILABLE, cause, limit=size(limits[memory]))
                if lost(cause):
                    raise
            c.free()
        return entered

    def race(contestants: list[Contestant], until: float) -> None:
        for who in contestants:
            who.turns = []
        for k in range(1 if c.tiny else TURNS):
            if k and time.monotonic() > until:
                break
            for who in contestants[k % len(contestants):] + contestants[:k % len(contestants)]:
                who.turns.append(turn(c, who.model, inputs, half))

    contestants = [eager, block, *enter(candidates(c, model, inputs, half, limits), end - 0.5 * seconds)]
    race(contestants, end - 0.4 * seconds)
    for who in contestants:
        tell(c, name, who, eager, block, limits)
    # Compiled models come last, because compiling takes longest. Each one races only eager mode, because torch.compile reuses compiled graphs.
    if c.emulated:
        return c.log.row(name, COMPILE, NOT_AVAILABLE, "torch.compile makes no kernels for an emulated device")
    del contestants[2:]
    for memory, limit in limits.items():
        for who in enter([(COMPILE, memory, lambda s=min(1.0, limit / eager.peak): compiled(c, model, inputs, half, s))], end - 0.1 * seconds):
            race([eager, who], end)
            tell(c, name, who, eager, block, limits)


def tell(c: Context, name: str, who: Contestant, eager: Contestant, block: Contestant, limits: dict[str, int]) -> None:
    limit, ratio = limits[who.memory], who.ratio(eager)
    figures = {"ms": f"{1e3 * statistics.median(who.turns):.2f}", "of_eager": f"{ratio:.3f}", "peak": size(who.peak)}
    verdict, cause, goal = TOLD, "", ""
    if remat.is_wrapped(who.model):
        plan = remat.of(who.model).plan
        figures |= {"predicted": f"{plan['seconds'] / plan['plain_seconds']:.3f}"}
        if who.memory == FULL:
            goal = "time <= eager's"
            verdict, cause = c.verdict_of_time(ratio <= EVEN)
        elif who.memory == PEAK:
            goal = ">= 6 % faster than checkpoint"
            figures["of_checkpoint"] = f"{who.ratio(block):.3f}"
            verdict, cause = c.verdict_of_time(who.ratio(block) <= FASTER)
        else:
            goal, verdict = "peak <= budget", PASSED
        if who.memory != FULL and who.peak > limit:
            verdict, cause = FAILED, f"the measured peak is {size(who.peak - limit)} above the budget"
    if who.memory != FULL:
        figures["of_limit"] = f"{who.peak / limit:.3f}"
    c.log.row(name, who.name if who in (eager, block) else f"{who.name}, {who.memory}", verdict, cause, goal, **figures)
