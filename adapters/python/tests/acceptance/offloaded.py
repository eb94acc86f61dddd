# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of offloaded activations and weights."""

import torch

import remat


#: A width at which products of matrices take several times as long as copies of their results, so that plans copy also to a slow disk.
WIDE = 512


class Net(torch.nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.width = width
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) + x
        return x.square().mean()


def inputs(net):
    return torch.randn(2**18 // net.width, net.width)


def trained(net, steps=5):
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(inputs(net))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in net.parameters()]


def net(width=128, **options):
    torch.manual_seed(2)
    made = Net(width)
    return remat.wrap(made, (inputs(made),), cache=False, time_limit=3, **options) if options else made


def in_files(model, folder):
    """Names of the parameters and buffers whose memory is mapped from a file in `folder`."""
    with open("/proc/self/maps") as table:
        ranges = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in table if str(folder) in line]
    return [name for name, t in model.state_dict(keep_vars=True).items() if any(a <= t.data_ptr() < b for a, b in ranges)]
