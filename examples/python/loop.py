# SPDX-License-Identifier: Apache-2.0
"""Your own training loop, inside a budget."""
import torch

import remat

device = [d["device"] for d in remat.devices() if not d["problem"]][:2][-1]  # the first GPU that steps can run on, or "cpu"
layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
remat.wrap(model, budget="70% of activations", planner=remat.Planner(time_limit=5))  # the one line
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(16, 64, 64).to(device)
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
print(remat.of(model).report())
