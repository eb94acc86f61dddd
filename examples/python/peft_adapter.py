# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter on a frozen model, inside a budget."""
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import remat

device = [d["device"] for d in remat.devices() if not d["problem"]][:2][-1]  # the first GPU that steps can run on, or "cpu"
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0))
model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)).to(device)
remat.wrap(model, budget="70% of activations", planner=remat.Planner(time_limit=5))  # the one line
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
before = model.base_model.model.transformer.h[0].attn.c_attn.base_layer.weight.clone()
for step in range(4):
    ids = torch.randint(0, 256, (16, 64)).to(device)
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
assert torch.equal(model.base_model.model.transformer.h[0].attn.c_attn.base_layer.weight, before)  # frozen
print(remat.of(model).report())
