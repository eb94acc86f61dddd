# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of gradients that are freed during the backward."""

import torch

import remat


def net(width=128, depth=5):
    torch.manual_seed(2)
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width)) for _ in range(depth)]
    return torch.nn.Sequential(*layers)


def batch(i, width=128, rows=64):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(i))


def train(model, steps=6, loss=lambda model, x: model(x).square().mean()):
    losses = []
    for i in range(steps):
        value = loss(model, batch(i))
        value.backward()
        losses.append(value.item())
    return losses


def leaves(model):
    return "gradients leave" in remat.of(model).plan["inputs"]
