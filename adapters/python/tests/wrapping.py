# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of remat.wrap."""

import emulated
import torch
from torch import nn

emulated.use_by_default()


def data(*shapes, steps=3, seed=1):
    g = emulated.generator(seed)
    return [tuple(torch.randn(s, generator=g) for s in shapes) for _ in range(steps)]


def inputs(steps=3, rows=256, width=32):
    return [((x,), {}) for x, in data((rows, width), steps=steps)]


class Chain(nn.Module):
    """A few layers, dropout, batch norm."""

    def __init__(self, width=32, depth=4, dropout=0.1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)
        self.scale = 1.0

    def forward(self, x):
        """Doc of forward."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.dropout(self.norm(x)) * self.scale
