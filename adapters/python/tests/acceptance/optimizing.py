# SPDX-License-Identifier: Apache-2.0
"""Shared models and optimizers of the tests of remat.optimizer."""

import torch


WIDTH = 96  # a weight has 36 KiB


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH),
                               torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))


def batch(i):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i))


def train(model, optimizer, steps=20, first=0, scheduler=None):
    for i in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(i)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]
