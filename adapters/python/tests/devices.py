# SPDX-License-Identifier: Apache-2.0
"""Wrapped training on the device of REMAT_TEST_DEVICE equals plain training bit by bit, without races.

usage: devices.py [--short]: --short leaves out most trainings with captured steps
"""

import gc
import sys
import warnings

import emulated
import torch
from follow_values import Mixture

import remat

DEVICE = emulated.device
torch.set_num_threads(1)


class Gpt(torch.nn.Module):
    def __init__(self, width=32, words=50):
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(width, 4, 64, 0.1, batch_first=True, activation="gelu") for _ in range(2))
        self.head = torch.nn.Linear(width, words)

    def forward(self, x):
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return torch.nn.functional.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


class Conv(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, stride=2), torch.nn.Dropout(0.2))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3))).square().mean()


class Routed(torch.nn.Module):
    """Reads values of activations and takes another path in each step."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Mixture(32, 4, 2), torch.nn.Linear(32, 8)

    def forward(self, x):
        h = self.body(x)
        h = h * (1 + h.detach().abs().mean().item())
        return self.head(h[h.detach()[:, 0] > 0]).square().mean() + self.head(h).mean()


class Cell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 32), torch.nn.LayerNorm(32))

    def forward(self, x):
        return x + self.body(x)


class Unrolled(torch.nn.Module):
    """Six calls of a cell in flight, on two streams. Only the cell is planned."""

    def __init__(self):
        super().__init__()
        self.cell = Cell()

    def forward(self, x):
        y = self.cell(self.cell(self.cell(x)))
        here, side = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
        side.wait_stream(here)
        y.record_stream(side)
        with side:
            for _ in range(3):
                y = self.cell(y)
        here.wait_stream(side)
        y.record_stream(here)
        return y.square().mean()


def train(make, sample, options, steps=4):
    """Trains a model. Returns losses, parameters, buffers and the state of the generator."""
    torch.manual_seed(1)
    model, x = make().to(DEVICE), sample().to(DEVICE)
    if options is not None:
        remat.wrap(getattr(model, "cell", model), cache=False, time_limit=5, **options)
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in [*losses, *model.parameters(), *model.buffers()]]


def train_anew(make, samples, options):
    """Like `train`, with new data and shapes in each step. Returns (results, jobs per step, reserved memory per step, memory figures of the session)."""
    torch.manual_seed(1)
    model, data = make().to(DEVICE), [make_sample().to(DEVICE) for make_sample in samples]
    gc.collect()
    torch.accelerator.empty_cache()
    if options is not None:
        remat.wrap(model, cache=False, time_limit=1, **options)  # no search beside the steps: a better plan would be captured anew
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses, jobs, reserved = [], [], []
    for x in data:
        optimizer.zero_grad()
        before = emulated.jobs()
        loss = model(x)
        loss.backward()
        jobs.append(emulated.jobs() - before)
        optimizer.step()
        losses.append(loss.detach())
        reserved.append(torch.accelerator.memory_reserved())
    left = [t.detach().cpu() for t in [*losses, *model.parameters(), *model.buffers()]]
    memory = remat.of(model).memory() if options is not None else {}
    return [*left, torch.get_device_module(DEVICE).get_rng_state()], jobs, reserved, memory


def check_graphs():
    """Replayed graphs equal plain steps. They need fewer launches and no more memory."""
    gpt = [lambda: torch.randint(0, 50, (8, 16)), lambda: torch.randint(0, 50, (6, 12))]
    conv = [lambda: torch.randn(4, 3, 24, 24), lambda: torch.randn(2, 3, 20, 20)]
    compared = 0
    for make, shapes, tight in ((Gpt, gpt, "60% of activations"), (Conv, conv, "92% of activations")):
        for samples in (shapes[:1] * 6, shapes * 5):
            plain, _, _, _ = train_anew(make, samples, None)
            for options in ({"budget": "100% of activations"}, {"budget": tight}, {"budget": tight, "offload": "activations"}):
                _, launched, _, _ = train_anew(make, samples, options)
                for late in (0, 50):
                    emulated.set_option("late", late)
                    with warnings.catch_warnings(record=True) as told:
                        warnings.simplefilter("always")
                        planned, jobs, reserved, memory = train_anew(make, samples, options | {"graph": True})
                    emulated.set_option("late", 0)
                    where = (make, len(samples), options, late)
                    assert not [w for w in told if "not captured" in str(w.message)], (where, [str(w.message) for w in told])
                    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True)), where
                    assert emulated.races() == 0, emulated.race_reports()
                    assert not emulated.is_emulated or max(jobs[-2:]) < 20 < min(launched[-2:]), (where, launched, jobs)
                    held_losses = 512 * len(samples)
                    assert reserved[-1] <= reserved[3] + held_losses, (where, reserved)
                    assert memory["planned"] <= memory["budget"], (where, memory)
                    compared += 1
    return compared


def check_fallback():
    """A step that reads a number on the host is not captured. One warning says so, and the results are right."""
    def train_scaled(options):
        torch.manual_seed(1)
        model, data = torch.nn.Linear(64, 64).to(DEVICE), torch.randn(4, 8, 64).to(DEVICE)
        model.register_buffer("scale", torch.tensor(1.0))
        model.forward = lambda x: (torch.nn.functional.linear(x, model.weight, model.bias) * model.scale).square().mean()
        if options is not None:
            remat.wrap(model, cache=False, **options)
        losses = []
        for k in range(4):
            model.scale.fill_(k + 1.0)
            model.zero_grad()
            loss = model(data[k])
            loss.backward()
            losses.append(loss.detach().cpu())
        return losses
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert train_scaled({"graph": True}) == train_scaled(None)
    assert ["scale is on cpu" in str(w.message) for w in told if "not captured" in str(w.message)] == [True], told
    model = remat.wrap(torch.nn.Linear(4, 4), cache=False, graph=True, on_refuse="raise")
    try:
        model(torch.randn(2, 4))
    except remat.Refused as e:
        assert "graphs are for accelerators" in str(e)
    else:
        raise AssertionError("graphs on the host")


def main():
    usable = [d for d in remat.devices() if not d["problem"]]
    assert str(DEVICE) in [d["device"] for d in usable], remat.devices()
    assert all(d["problem"].count("\n") == 0 for d in remat.devices())
    compared = 0
    for make, sample in ((Gpt, lambda: torch.randint(0, 50, (8, 16))), (Conv, lambda: torch.randn(4, 3, 24, 24)), (Routed, lambda: torch.randn(256, 32)),
                         (Unrolled, lambda: torch.randn(64, 32))):
        plain = train(make, sample, None)
        for options in ({"budget": "100% of activations"}, {"budget": "90% of activations", "offload": "activations"}, {"budget": "90%"}):
            for late in (0, 50):
                emulated.set_option("late", late)
                planned = train(make, sample, options)
                emulated.set_option("late", 0)
                assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True)), (make, options, late)
                assert emulated.races() == 0, emulated.race_reports()
                compared += 1
    check_fallback()
    if "--short" not in sys.argv:
        compared += check_graphs()
    print(f"{compared} trainings on {DEVICE} equal plain training")


if __name__ == "__main__":
    sys.exit(main())
