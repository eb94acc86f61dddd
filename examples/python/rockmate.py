# SPDX-License-Identifier: Apache-2.0
"""The scenario of Rockmate's README with another import: a ResNet-101 trains within a budget, then once more with its optimizer in the backward.

usage: rockmate.py [tiny]: small images and a small network, for a quick look
"""
import sys

import torch
from torchvision.models import resnet18, resnet101

from remat.rockmate import Hiremate, Offmate, PureRockmate  # was: from rockmate import ...

tiny = sys.argv[1:] == ["tiny"]
make, shape, m_budget = (resnet18, [8, 3, 64, 64], 40 * 1024**2) if tiny else (resnet101, [100, 3, 128, 128], 2 * 1024**3)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dataset = [(torch.randn(shape).to(device), torch.randint(0, 1000, shape[:1]).to(device)) for _ in range(3)]
sample = dataset[0][0]
loss_function = torch.nn.CrossEntropyLoss()

for method in (PureRockmate, Hiremate):
    resnet = make().to(device)
    optimizer = torch.optim.Adam(resnet.parameters())
    rk_resnet = method(resnet, sample, m_budget)
    for data, target in dataset:
        optimizer.zero_grad()
        y = rk_resnet(data)
        loss = loss_function(y, target)
        loss.backward()
        optimizer.step()  # updates the parameters of resnet
    print(f"{method.__name__}: loss {loss.item():.4f}, {rk_resnet.op_sched.peak_mem / 1024**2:.0f} MiB of activations")

resnet = make()  # need not fit on the device
rk_resnet = Offmate(resnet, sample, m_budget)
for data, target in dataset:
    loss = loss_function(rk_resnet(data), target)
    loss.backward()  # also steps the optimizer
print(f"Offmate: loss {loss.item():.4f}")
