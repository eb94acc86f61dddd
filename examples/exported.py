# SPDX-License-Identifier: Apache-2.0
"""A model leaves Python, is trained by a C++ program inside a budget, and comes back.

exported.py PROGRAM    the built examples/exported.cpp
"""
import subprocess
import sys
import tempfile

import torch
from torch import nn


class Reader(nn.Module):
    """Predicts the next token (of 40 tokens). The forward returns the loss."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(40, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, 0.1, batch_first=True) for _ in range(3))
        self.head = nn.Linear(64, 40)

    def forward(self, ids, next_ids):
        x = self.tokens(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), next_ids.flatten())}


torch.manual_seed(0)
model = Reader().train()  # before the export, because the file records whether dropout is active
ids = torch.arange(8)[:, None] + torch.arange(33) * 3
ids, next_ids = ids[:, :-1] % 40, ids[:, 1:] % 40
with tempfile.TemporaryDirectory() as folder:
    torch.export.save(torch.export.export(model, (ids, next_ids)), folder + "/reader.pt2")
    subprocess.run([sys.argv[1], folder + "/reader.pt2", "60%"], check=True)
    before = model(ids, next_ids)["loss"].item()
    model.load_state_dict(torch.load(folder + "/reader.pt"))
after = model(ids, next_ids)["loss"].item()
print(f"back in Python: loss {before:.3f} before, {after:.3f} after")
assert after < 0.5 * before
