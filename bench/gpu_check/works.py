# SPDX-License-Identifier: Apache-2.0
"""Models of the part `speed`, built from configurations with random weights."""

from __future__ import annotations

import torch
from models import ResNet
from step import Loss, UNet, classification, language_model


def gpt2(tiny: bool):
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_layer": 2, "n_embd": 48, "n_head": 4, "n_positions": 32, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0} if tiny else {}
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **size)
    net = GPT2LMHeadModel(config)
    return Loss(net, language_model, list(net.transformer.h)), (torch.randint(config.vocab_size, (4, 32 if tiny else 1024)),)


def llama(tiny: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    size = ({"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
            if tiny else {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
                          "vocab_size": 128256, "tie_word_embeddings": True})
    config = LlamaConfig(max_position_embeddings=32 if tiny else 2048, **size)
    net = LlamaForCausalLM(config)
    return Loss(net, language_model, list(net.model.layers)), (torch.randint(config.vocab_size, (2, 32 if tiny else 2048)),)


def resnet50(tiny: bool):
    if tiny:
        net = ResNet(8, 2, 2)
        return Loss(net, classification, [block for stage in net.stages for block in stage]), (torch.randn(2, 3, 16, 16), torch.randint(10, (2,)))
    from torchvision.models import resnet50 as make

    net = make()
    blocks = [block for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for block in layer]
    return Loss(net, classification, blocks), (torch.randn(64, 3, 224, 224), torch.randint(1000, (64,)))


def unet(tiny: bool):
    net = UNet(8, 2) if tiny else UNet(48, 4)
    n, side = (2, 24) if tiny else (8, 256)
    return Loss(net, classification, [*net.down, *net.join]), (torch.randn(n, 3, side, side), torch.randint(4, (n, side, side)))


#: Models by name: (function that makes the model and its inputs, True for bf16 autocast)
WORKS = {"GPT-2": (gpt2, True), "ResNet-50": (resnet50, True), "U-Net": (unet, True), "Llama 1 B": (llama, True)}
