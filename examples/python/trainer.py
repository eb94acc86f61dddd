# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Trainer, inside a budget."""
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import remat

device = [d["device"] for d in remat.devices() if not d["problem"]][:2][-1]  # the first GPU that steps can run on, or "cpu"
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
remat.wrap(model, budget="70% of activations", planner=remat.Planner(time_limit=5))  # the one line
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 256, (64, 64))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, per_device_train_batch_size=16, max_steps=4, report_to="none",
                                  use_cpu=device == "cpu", save_strategy="no")
    Trainer(model, arguments, train_dataset=rows).train()
print(remat.of(model).report())
