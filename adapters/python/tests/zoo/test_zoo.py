# SPDX-License-Identifier: Apache-2.0
"""Every model of the zoo trains within several budgets. Results equal eager mode bit by bit."""

import os

import emulated
import pytest
import torch
from differential import ANY_PLAN, SEARCHED, assert_same, train
from models import ZOO, mixtral_with

import remat

LOSS = 64 if emulated.on_host else 512  #: bytes of the gradient of the loss, which no plan of the model counts
FULL = os.environ.get("REMAT_FULL") == "1"


def made(name):
    torch.manual_seed(0)
    return ZOO[name].make().train()


def batches(name, steps=5):
    g = emulated.generator(1)
    return [ZOO[name].batch(g) for _ in range(steps)]


def bytes_of(tensors):
    return sum(s.nbytes() for s in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def peak_of(session):
    """The peak of requested bytes. CUDA's allocator would also count unused ends of large blocks."""
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] if emulated.device.type == "cuda" else session.memory()["peak"]


def planned(name, budget):
    """Trains by plans. Checks that every step stays inside the budget, except steps that capture."""
    model = remat.wrap(made(name), budget=budget, planner=SEARCHED if budget == "60% of activations" else ANY_PLAN)
    session = remat.of(model)
    data = batches(name)
    own = bytes_of([*model.parameters(), *model.buffers(), *data[0].values()])
    before = {}

    def begin():
        if session.plans:
            session.release()
            session.reset_peak()
            before.update(peak=peak_of(session), plans=len(session.plans))

    def end():
        if before and before["plans"] == len(session.plans):
            assert own + peak_of(session) - before["peak"] <= session.memory()["budget"] + LOSS

    return train(model, data, before=begin, after=end), session


@pytest.mark.parametrize("name", [name for name, e in ZOO.items() if FULL or not e.large])
def test_zoo(name):
    plain = train(made(name), batches(name))
    with pytest.raises(remat.OverBudget) as over:
        planned(name, 1)
    smallest = over.value.needed
    for budget in ("100% of activations", "60% of activations", "40% of activations", smallest):
        try:
            steps, session = planned(name, budget)
        except remat.OverBudget as e:
            assert budget in ("60% of activations", "40% of activations"), e
            assert e.needed == smallest
            continue
        assert_same(plain, steps)
        if budget == smallest:
            assert session.plan["recomputed"] > 0


def test_experts_in_a_loop():
    """A loop over the experts with tokens is planned, whichever experts have tokens."""

    def made():
        torch.manual_seed(0)
        return mixtral_with("eager").train()

    data = batches("mixtral")
    assert_same(train(made(), data), train(remat.wrap(made(), budget="80% of activations", on_refuse="raise"), data))
