# SPDX-License-Identifier: Apache-2.0
"""Trains on an accelerator a model whose weights stay in memory of the host. The guide on offloading quotes it."""
import sys

import torch

import remat

devices = [d["device"] for d in remat.devices() if not d["problem"] and d["device"] != "cpu"]
if not devices:
    sys.exit("this needs an accelerator: " + "; ".join(f"{d['device']}: {d['problem']}" for d in remat.devices() if d["problem"]))

layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
remat.wrap(model, device=devices[0], budget="70% of activations", offload="all", host_budget="1 GiB",
           planner=remat.Planner(time_limit=5))
optimizer = remat.optimizer(model.parameters(), torch.optim.AdamW, model=model, step="overlap", lr=1e-3)
for step in range(4):
    x = torch.randn(16, 64, 64)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
assert all(p.device.type == "cpu" for p in model.parameters()) and loss.device.type != "cpu"
