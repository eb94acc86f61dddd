# SPDX-License-Identifier: Apache-2.0
"""Tests the installed package on the device of REMAT_TEST_DEVICE: training in half of the activation memory equals plain training bit by bit."""

import pathlib
import sys

import emulated
import torch

import remat

LOSS = 512  #: upper bound on the bytes of the gradient of the loss, which no plan of the model counts


class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())))

    def forward(self, x):
        return self.layers(x).square().mean()


def train(budget):
    """Trains five steps. Returns (losses and parameters, memory figures, peak of the last step beyond the bytes held before, bytes)."""
    torch.manual_seed(1)
    model, x = Deep().to(emulated.device), torch.randn(256, 64).to(emulated.device)
    if budget is not None:
        remat.wrap(model, budget=budget, cache=False, time_limit=5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses, told, beyond = [], {}, 0
    for k in range(5):
        optimizer.zero_grad()
        if k == 4 and budget is not None:  # earlier steps capture, profile, and learn how the loss uses the outputs
            remat.of(model).release()
            remat.of(model).reset_peak()
            beyond = -remat.of(model).memory()["peak"]
        loss = model(x)
        loss.backward()
        if k == 4 and budget is not None:
            told = remat.of(model).memory()
            beyond += told["peak"]
        optimizer.step()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in (*losses, *model.parameters())], told, beyond


def check_devices():
    """CUDA is usable if PyTorch can use it. Otherwise the reported reason is the driver, not the plug-in."""
    told = {d["device"].split(":")[0]: d["problem"] for d in remat.devices()}
    if torch.version.cuda is not None:
        problem = told["cuda"]
        assert not problem if torch.cuda.is_available() else "NVIDIA driver" in problem, problem
    assert not told[emulated.device.type], told


def main():
    assert pathlib.Path(sys.prefix) in pathlib.Path(remat.__file__).parents, remat.__file__
    check_devices()
    plain, _, _ = train(None)
    full, told, whole = train("100% of activations")
    half, told_of_half, beyond = train("50% of activations")
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, full, half, strict=True))
    planned = [m["planned"] - m["held"] for m in (told_of_half, told)]
    assert 0 < planned[0] <= planned[1] / 2, planned
    assert 0 < beyond <= told_of_half["budget"] - told_of_half["held"] + LOSS, (beyond, told_of_half)
    assert beyond < whole, (beyond, whole)
    assert emulated.races() == 0, emulated.race_reports()
    print(f"installed in {sys.prefix}: trains on {emulated.device} within {planned[0]} of {planned[1]} bytes of activations")


if __name__ == "__main__":
    main()
