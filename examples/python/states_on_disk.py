# SPDX-License-Identifier: Apache-2.0
"""A training loop whose optimizer keeps its states on a disk."""
import tempfile

import torch

import remat

layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
with tempfile.TemporaryDirectory() as folder:
    optimizer = remat.optimizer(model.parameters(), torch.optim.AdamW, disk=folder, lr=1e-3)  # the one line
    for step in range(4):
        x = torch.randn(16, 64, 64)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")
    print(optimizer.memory())
