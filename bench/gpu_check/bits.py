# SPDX-License-Identifier: Apache-2.0
"""The part `bits`: wrapped training equals plain training bit by bit, if two runs of plain training are equal."""

from __future__ import annotations

import re
import warnings

import emulated
import torch
from context import Context, deterministic
from models import models
from report import FAILED, NOT_AVAILABLE, PASSED, TOLD, size

import remat

BUDGETS = ("100% of activations", "60% of activations")
GOAL = "equal bit by bit"


def cases(tiny: bool) -> list[str]:
    return list(models(tiny))


def train(c: Context, name: str, budget: str | int | None) -> tuple[dict, torch.nn.Module]:
    """Trains a model. Returns (losses, parameters, buffers and generator states by (step, name); the model)."""
    make, sample, half = models(c.tiny)[name]
    steps = 3 if c.tiny else 5
    torch.manual_seed(1)
    model, batches = make().to(c.device), [c.to_device(sample()) for _ in range(steps)]
    if budget is not None:
        remat.wrap(model, budget=budget, **c.options())
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    found = {}
    for k, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        with c.autocast(half):
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        found[k, "the loss"] = loss.detach().cpu()
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            found |= {(k, f"{kind} {n}"): t.detach().cpu().clone() for n, t in named}
        found[k, "the state of the generator"] = torch.get_device_module(c.device).get_rng_state(c.device).cpu()
    return found, model


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if both tensors have the same bits. So NaN equals NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def differences(a: dict, b: dict) -> list[tuple[int, str]]:
    return [key for key in a if not same(a[key], b[key])]


def operators(caught: list) -> list[str]:
    """Names of the operators without a deterministic kernel, from PyTorch's warnings."""
    found = (re.match(r"(\S+) does not have a deterministic implementation", str(w.message)) for w in caught)
    return sorted({m[1] for m in found if m})


def run(c: Context, name: str) -> None:
    if models(c.tiny)[name][2] and not c.has_bf16():
        return c.log.row(name, "plain", NOT_AVAILABLE, "the device has no bf16", GOAL)
    deterministic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain, model = train(c, name, None)
        del model
        unstable = set(differences(plain, train(c, name, None)[0]))
    told = {"values": len(plain)}
    if unstable:
        step, first = min(unstable, key=lambda key: key[0])
        told |= {"differ": len(unstable), "first": f"{first} at step {step}"}
    if found := operators(caught):
        told["without_a_deterministic_kernel"] = " ".join(found)
    c.log.row(name, "plain, twice", TOLD, "plain training does not equal itself" if unstable else "", **told)
    for budget in BUDGETS:
        compare(c, name, budget, plain, unstable)


def compare(c: Context, name: str, budget: str, plain: dict, unstable: set) -> None:
    what = budget
    try:
        try:
            ours, model = train(c, name, budget)
        except remat.OverBudget as e:
            if not e.needed:
                raise
            smallest = int(e.needed * 1.02)
            what = f"{size(smallest)}, as {budget} is too little"
            ours, model = train(c, name, smallest)
    except remat.Refused as e:
        return c.log.row(name, what, FAILED, f"refused: {e}", GOAL)
    plan, memory = remat.of(model).plan, remat.of(model).memory()
    figures = {"again": plan["recomputed"], "planned": size(memory["planned"])}
    causes = []
    if judged := sorted(key for key in differences(plain, ours) if key not in unstable):
        (step, first), more = judged[0], [f"{n} at step {k}" for k, n in judged[1:4]]
        causes.append(f"bits differ in {first} at step {step}" + (f", and in {len(judged) - 1} more values: {', '.join(more)}" if more else ""))
    if emulated.races():
        causes.append(f"a race: {emulated.race_reports()[0]}")
        emulated.reset()
    if causes:
        return c.log.row(name, what, FAILED, "; ".join(causes), GOAL, **figures)
    c.log.row(name, what, PASSED, "", GOAL, equal=f"{len(plain) - len(unstable)} of {len(plain)} values", **figures)
