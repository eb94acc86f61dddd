# SPDX-License-Identifier: Apache-2.0
"""Networks for images that torchvision lacks, or whose width it fixes; and an encoder-decoder Transformer."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mixing(nn.Module):
    """A perceptron over the patches, then one over the channels."""

    def __init__(self, patches: int, width: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.tokens = nn.Sequential(nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.channels(self.norms[1](x))
        return result


class Mixer(nn.Module):
    def __init__(self, image: int, patch: int, width: int, depth: int, classes: int = 1000):
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.ModuleList(Mixing((image // patch) ** 2, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x).mean(1))
        return result


def convolution(a: int, b: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(a, b, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]


def mobilenet(width: int, classes: int = 1000) -> nn.Module:
    """MobileNet v1: depthwise and pointwise convolutions."""
    layers = convolution(3, width, stride=2)
    a = width
    for b, stride in [(2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *[(16, 1)] * 5, (32, 2), (32, 1)]:
        layers += convolution(a, a, stride=stride, groups=a) + convolution(a, b * width, 1)
        a = b * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(a, classes))


def stages(width: int, times: tuple[int, ...]) -> list[nn.Module]:
    """The stages of a VGG network: convolutions, then pooling."""
    a = 3
    found: list[nn.Module] = []
    for n, factor in zip(times, (1, 2, 4, 8, 8)):
        stage: list[nn.Module] = []
        for _ in range(n):
            stage += [nn.Conv2d(a, factor * width, 3, padding=1), nn.ReLU(inplace=True)]
            a = factor * width
        found.append(nn.Sequential(*stage, nn.MaxPool2d(2)))
    return found


def vgg(width: int, times: tuple[int, ...], image: int, classes: int) -> nn.Module:
    """VGG16 or VGG19. times: convolutions per stage."""
    top = 64 * width
    return nn.Sequential(*stages(width, times), nn.Flatten(), nn.Linear(8 * width * (image // 32) ** 2, top), nn.ReLU(inplace=True), nn.Dropout(),
                         nn.Linear(top, top), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(top, classes))


class FCN8(nn.Module):
    """The convolutions of VGG16, and the sum of class scores at three scales."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.stages = nn.ModuleList(stages(width, (2, 2, 3, 3, 3)))
        a = 8 * width
        top = 64 * width
        self.classifier = nn.Sequential(nn.Conv2d(a, top, 7, padding=3), nn.ReLU(inplace=True), nn.Dropout(), nn.Conv2d(top, top, 1),
                                        nn.ReLU(inplace=True), nn.Dropout(), nn.Conv2d(top, classes, 1))
        self.scores = nn.ModuleList([nn.Conv2d(4 * width, classes, 1), nn.Conv2d(8 * width, classes, 1)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(classes, classes, 2, 2), nn.ConvTranspose2d(classes, classes, 2, 2), nn.ConvTranspose2d(classes, classes, 8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for stage in self.stages:
            x = stage(x)
            seen.append(x)
        x = self.up[0](self.classifier(x)) + self.scores[1](seen[3])
        x = self.up[1](x) + self.scores[0](seen[2])
        result: Tensor = self.up[2](x)
        return result


class SegNet(nn.Module):
    """The convolutions of VGG16 and a mirrored decoder. The decoder unpools with the indices of the pooling."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        plan = [(2, width), (2, 2 * width), (3, 4 * width), (3, 8 * width), (3, 8 * width)]
        a, down = 3, []
        for times, b in plan:
            down.append(nn.Sequential(*[m for i in range(times) for m in convolution(a if i == 0 else b, b)]))
            a = b
        up = []
        for (times, b), (_, after) in zip(reversed(plan), [*reversed(plan[:-1]), (0, width)]):
            up.append(nn.Sequential(*[m for i in range(times) for m in convolution(b, after if i == times - 1 else b)]))
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(up)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = []
        for stage in self.down:
            x = stage(x)
            size = x.shape[-2:]
            x, where = F.max_pool2d(x, 2, return_indices=True)
            pooled.append((where, size))
        for stage in self.up:
            where, size = pooled.pop()
            x = stage(F.max_unpool2d(x, where, [2, 2], output_size=size))
        result: Tensor = self.head(x)
        return result


class Translator(nn.Module):
    """An encoder-decoder of PyTorch's Transformer layers."""

    def __init__(self, words: int, width: int, depth: int, heads: int, longest: int):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(longest, width))
        self.transformer = nn.Transformer(width, heads, depth, depth, 4 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        later = torch.full((length, length), float("-inf"), device=target.device).triu(1)
        x, y = (self.words(t) + self.places[: t.shape[1]] for t in (source, target))
        result: Tensor = self.head(self.transformer(x, y, tgt_mask=later, tgt_is_causal=True))
        return result
