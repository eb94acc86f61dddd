# SPDX-License-Identifier: Apache-2.0
"""Wrapped training on the device of REMAT_TEST_DEVICE equals plain training bit by bit, without races."""

import sys

import emulated
import torch

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


def train(make, sample, options, steps=4):
    """What training leaves: losses, parameters, buffers, the state of the generator."""
    torch.manual_seed(1)
    model, x = make().to(DEVICE), sample().to(DEVICE)
    if options is not None:
        remat.wrap(model, cache=False, time_limit=5, **options)
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


def main():
    usable = [d for d in remat.devices() if not d["problem"]]
    assert str(DEVICE) in [d["device"] for d in usable], remat.devices()
    assert all(d["problem"].count("\n") == 0 for d in remat.devices())
    compared = 0
    for make, sample in ((Gpt, lambda: torch.randint(0, 50, (8, 16))), (Conv, lambda: torch.randn(4, 3, 24, 24))):
        plain = train(make, sample, None)
        for options in ({"budget": "100% of activations"}, {"budget": "90% of activations", "offload": "activations"}, {"budget": "90%"}):
            for late in (0, 50):
                emulated.set_option("late", late)
                planned = train(make, sample, options)
                emulated.set_option("late", 0)
                assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True)), (make, options, late)
                assert emulated.races() == 0, emulated.race_reports()
                compared += 1
    print(f"{compared} trainings on {DEVICE} equal plain training")


if __name__ == "__main__":
    sys.exit(main())
