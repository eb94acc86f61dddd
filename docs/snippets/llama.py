# SPDX-License-Identifier: Apache-2.0
"""A Llama of 1.1 billion parameters without data, for docs/guides/fit.md."""
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make(batch=4, length=2048):
    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                         num_key_value_heads=4, use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(batch, length, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}
