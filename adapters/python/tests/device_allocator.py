# SPDX-License-Identifier: Apache-2.0
"""Training on a device whose allocator chooses all addresses: the emulated accelerator with EMULATED_HANDLES=1, and CUDA without remat's plug-in."""

import warnings

import emulated
import torch
from compare import same
from devices import DEVICE, Conv, Gpt, Routed, Unrolled, train
from device_faults import raises

import remat

MODELS = ((Gpt, lambda: torch.randint(0, 50, (8, 16))), (Conv, lambda: torch.randn(4, 3, 24, 24)), (Routed, lambda: torch.randn(256, 32)),
          (Unrolled, lambda: torch.randn(64, 32)))


def check_bits():
    for make, sample in MODELS:
        plain = train(make, sample, None)
        budgets = ("100% of activations", "90% of activations")
        for budget in budgets[:1] if make is Unrolled else budgets:  # on such a device, each call in flight has its own plan
            for late in (0, 50):
                emulated.set_option("late", late)
                planned = train(make, sample, {"budget": budget})
                emulated.set_option("late", 0)
                assert same(plain, planned), (make, budget, late)
                assert emulated.races() == 0, emulated.race_reports()


def check_memory():
    """Allocated bytes stay inside the budget, as in an arena, because dead buffers return to the allocator."""
    torch.manual_seed(1)
    model, x = Gpt(width=64).to(DEVICE), torch.randint(0, 50, (16, 32), device=DEVICE)
    remat.wrap(model, budget="60% of activations", cache=False, time_limit=5, gap=0.9)
    session = remat.of(model)
    for _ in range(4):
        model.zero_grad()
        model(x).backward()
    memory = session.memory()
    assert session.plan.recomputed > 0, session.plan
    assert 0.9 * memory["planned"] < memory["peak"] <= memory["budget"], memory
    assert "not guaranteed" in str(session.report()), session.report()


def check_gradients_that_leave():
    """Hooks free each gradient as soon as it is complete."""
    def run(options):
        torch.manual_seed(1)
        model, x = Gpt().to(DEVICE), torch.randint(0, 50, (8, 16), device=DEVICE)
        if options:
            remat.wrap(model, cache=False, **options)

        def step(p):
            p.data.sub_(0.1 * p.grad)
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        torch.manual_seed(2)
        losses = []
        for _ in range(4):
            loss = model(x)
            loss.backward()
            losses.append(loss.detach())
        return [t.detach().cpu() for t in [*losses, *model.parameters()]]
    assert same(run({}), run({"budget": "80% of activations"}))


def check_refusals():
    """Options that need chosen addresses raise an error that names them, or cause one warning."""
    ids = torch.randint(0, 50, (8, 16), device=DEVICE)
    for model, options in ((Gpt().to(DEVICE), {"offload": "activations"}), (Gpt(), {"offload": "all", "device": str(DEVICE)})):
        raises(remat.Error, "cannot choose addresses", lambda: remat.wrap(model, cache=False, **options)(ids))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(*MODELS[0], {"graph": True})
    assert ["has no fixed addresses" in str(w.message) for w in told if "not captured" in str(w.message)] == [True], [str(w.message) for w in told]


if __name__ == "__main__":
    emulated.run_checks(globals(), "checks without addresses")
