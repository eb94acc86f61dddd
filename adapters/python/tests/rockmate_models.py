# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of Rockmate's classes."""

import torch
from torch import nn

import remat


KINDS = ("rotor", "rockmate", "checkmate", "hilp", "hiremate", "offmate", "noremat")


class Net(nn.Module):
    """A model with batch norm, dropout, a residual connection and tied weights."""

    def __init__(self, width=32, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.BatchNorm1d(width),
                                                  nn.Dropout(0.2)) for _ in range(depth))
        self.head = nn.Linear(width, width, bias=False)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x):
        x = self.head(x)
        for block in self.blocks:
            x = x + block(x)
        return self.tied(x)


def sample(seed=5):
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(seed))


def plan_of(rk):
    return remat.of(rk.original_mod).plan
