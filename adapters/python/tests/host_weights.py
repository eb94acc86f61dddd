# SPDX-License-Identifier: Apache-2.0
"""Training on the device of REMAT_TEST_DEVICE with weights in memory of the host equals plain training there, bit by bit."""

import gc
import sys

import emulated
import torch
from devices import DEVICE, Conv, Gpt

import remat


def train(make, sample, wrapped, steps=4, passes=1):
    """Losses, parameters, buffers and the state of the generator that training leaves.

    wrapped: options, or None for plain training on the device.
    passes: backwards whose gradients add up before each step.
    """
    gc.collect()
    torch.manual_seed(1)
    model, x = make(), sample()
    before = torch.accelerator.memory_allocated()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if wrapped is None:
        model, x = model.to(DEVICE), x.to(DEVICE)
    else:
        remat.wrap(model, device=DEVICE, offload="all", cache=False, time_limit=5, **wrapped)
        assert all(torch.equal(p, weights[name]) and p.device.type == "cpu" for name, p in model.named_parameters())
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)  # the same arithmetic on host and device
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    losses = []
    for k in range(steps):
        if k == 1:  # the first has captured and measured
            torch.accelerator.reset_peak_memory_stats()
        optimizer.zero_grad()
        for _ in range(passes):
            loss = model(x)
            loss.backward()
        if wrapped is not None:
            assert all(p.grad.device.type == "cpu" for p in model.parameters())
        optimizer.step()
        schedule.step()
        losses.append(loss.detach().cpu())
    if wrapped is not None:
        told = remat.of(model).memory()
        assert torch.accelerator.max_memory_allocated() - before <= told["budget"], (told, before, torch.accelerator.max_memory_allocated())
        assert told["fetched"] > 0, told
        model.eval()
        with torch.no_grad():
            losses.append(model(x))
        model.train()
        assert set(model.state_dict()) >= set(weights)
    else:
        model.eval()
        with torch.no_grad():
            losses.append(model(x))
    left = [t.detach().cpu() for t in [*losses, *model.parameters(), *model.buffers()]]
    return [*left, torch.get_device_module(DEVICE).get_rng_state()]


def check_refusals():
    model = torch.nn.Linear(64, 64)
    for options, why in (({"offload": "none"}, 'needs offload="all"'), ({"disk": "/tmp"}, "memory of the host"), ({"graph": True}, "stay on the device"),
                         ({"host_budget": 1000}, "less than the"), ({"device": "cpu"}, "accelerator")):
        try:
            remat.wrap(model, **{"device": DEVICE, "offload": "all", **options})
        except ValueError as e:
            assert why in str(e), e
        else:
            raise AssertionError(options)


def check_other_options():
    """Wrapped again without a device, the model trains on the host."""
    model, x = Conv(), torch.randn(4, 3, 24, 24)
    remat.wrap(model, device=DEVICE, offload="all", cache=False)(x).backward()
    assert {b.device.type for b in model.buffers()} == {DEVICE.type}
    remat.wrap(model, cache=False)(x).backward()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}


def main():
    torch.backends.mha.set_fastpath_enabled(False)  # which PyTorch takes or not by where weights are
    check_refusals()
    check_other_options()
    compared = 0
    for make, sample, tight in ((Gpt, lambda: torch.randint(0, 50, (8, 16)), 70), (Conv, lambda: torch.randn(4, 3, 24, 24), 92)):
        for passes in (1, 2):
            plain = train(make, sample, None, passes=passes)
            for budget in ("100% of activations", f"{tight}% of activations"):
                for late in (0, 50):
                    emulated.set_option("late", late)
                    planned = train(make, sample, {"budget": budget}, passes=passes)
                    emulated.set_option("late", 0)
                    where = (make, budget, late, passes)
                    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True)), where
                    assert emulated.races() == 0, emulated.race_reports()
                    compared += 1
    print(f"{compared} trainings on {DEVICE} with weights of the host equal plain training")


if __name__ == "__main__":
    sys.exit(main())
