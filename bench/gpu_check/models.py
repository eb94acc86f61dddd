# SPDX-License-Identifier: Apache-2.0
"""Models for the parts `bits`, `memory` and `finetune`, written with torch only. Each forward returns the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from step import UNet
from torch import nn


class GptBlock(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(b, n, w)), self.dropout, self.training)
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    def __init__(self, words, length, width, heads, layers, dropout=0.1):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def rotate(x, angles):
    """Rotary position embedding. x: (batch, heads, length, width of a head)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class LlamaBlock(nn.Module):
    def __init__(self, width, heads, groups, inner):
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, groups * self.each, bias=False)
        self.v, self.out = nn.Linear(width, groups * self.each, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, angles):
        b, n, w = x.shape
        h = self.before(x)
        q = rotate(self.q(h).view(b, n, self.heads, self.each).transpose(1, 2), angles)
        k = rotate(self.k(h).view(b, n, self.groups, self.each).transpose(1, 2), angles)
        v = self.v(h).view(b, n, self.groups, self.each).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, w))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, words, width, heads, groups, inner, layers):
        super().__init__()
        self.each = width // heads
        self.tokens = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        rates = 10000.0 ** (-torch.arange(self.each // 2, device=ids.device, dtype=torch.float32) / (self.each // 2))
        angles = places[:, None] * rates
        for block in self.blocks:
            x = block(x, angles)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Residual(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                                  nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b))
        self.short = nn.Identity() if stride == 1 and a == b else nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        return F.relu(self.body(x) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, width, stages, each, classes=10):
        super().__init__()
        widths = [width << i for i in range(stages)]
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList(nn.Sequential(*(Residual(widths[max(0, i - (j == 0))], b, 2 if i and not j else 1) for j in range(each)))
                                    for i, b in enumerate(widths))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2),
                                  nn.BatchNorm2d(width), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Labelled(nn.Module):
    """A network and its loss."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        return F.cross_entropy(self.net(x), labels)


class Encoder(nn.Module):
    def __init__(self, words, width, heads, layers):
        super().__init__()
        self.tokens, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, batch_first=True, activation="gelu") for _ in range(layers))

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _ids(words, batch, length):
    return lambda: (torch.randint(words, (batch, length)),)


def _images(batch, size, classes=10):
    return lambda: (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,)))


def _maps(batch, size):
    return lambda: (torch.randn(batch, 3, size, size), torch.randint(4, (batch, size, size)))


def models(tiny: bool) -> dict:
    """Models by name: (function that makes the model, function that makes the inputs of a step on the host, True for bf16 autocast)."""
    def of(small, large):
        return small if tiny else large

    gpt, llama = of((64, 16, 32, 4, 2), (8192, 256, 512, 8, 6)), of((64, 32, 4, 2, 64, 2), (8192, 512, 8, 4, 1408, 6))
    resnet, unet, encoder = of((8, 2, 2), (64, 4, 2)), of((8, 2), (32, 4)), of((64, 32, 4, 2), (8192, 512, 8, 6))
    ids, images, maps = _ids(*of((64, 4, 16), (8192, 8, 256))), _images(*of((4, 16), (32, 64))), _maps(*of((2, 16), (8, 96)))
    return {"GPT with dropout": (lambda: Gpt(*gpt), ids, False),
            "Llama-like": (lambda: Llama(*llama), ids, False),
            "ResNet": (lambda: Labelled(ResNet(*resnet)), images, False),
            "U-Net": (lambda: Labelled(UNet(*unet)), maps, False),
            "conv + batch norm": (lambda: Labelled(Conv(of(8, 64))), images, False),
            "encoder, bf16 autocast": (lambda: Encoder(*encoder), ids, True)}


def llama_3b(tiny: bool) -> tuple:
    """(function that makes the model, function that makes its inputs). The model has 3.2 billion parameters, or few if `tiny`."""
    if tiny:
        return lambda: Llama(64, 64, 4, 2, 128, 3), _ids(64, 4, 32)
    return lambda: Llama(32000, 3072, 24, 8, 8192, 28), _ids(32000, 4, 1024)
