# SPDX-License-Identifier: Apache-2.0
"""Neural operators on a square grid: FNO, U-FNO and UNO, small enough to read."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Spectral(nn.Module):
    """A linear map on the lowest frequencies. The output grid may have another size."""

    def __init__(self, inputs: int, outputs: int, modes: int):
        super().__init__()
        self.modes = modes
        scale = 1 / inputs
        self.low = nn.Parameter(scale * torch.randn(inputs, outputs, modes, modes, dtype=torch.complex64))
        self.high = nn.Parameter(scale * torch.randn(inputs, outputs, modes, modes, dtype=torch.complex64))

    def forward(self, x: Tensor, size: int) -> Tensor:
        k = self.modes
        spectrum = torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :k, :k], self.low)
        high = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -k:, :k], self.high)
        between = low.new_zeros(low.shape[0], low.shape[1], size - 2 * k, k)
        columns = F.pad(torch.view_as_real(torch.cat([low, between, high], 2)), (0, 0, 0, size // 2 + 1 - k))
        result: Tensor = torch.fft.irfft2(torch.view_as_complex(columns), s=(size, size))
        return result * (size / x.shape[-1]) ** 2


class SmallUNet(nn.Module):
    """The U-Net branch of a block of U-FNO: two steps down, two steps up."""

    def __init__(self, width: int):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(2))
        self.up = nn.ModuleList(nn.ConvTranspose2d((i + 1) * width, width, 2, 2) for i in range(2))
        self.out = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.leaky_relu(self.down[0](x))
        b = F.leaky_relu(self.down[1](a))
        c = torch.cat([a, F.leaky_relu(self.up[0](b))], 1)
        result: Tensor = self.out(torch.cat([x, F.leaky_relu(self.up[1](c))], 1))
        return result


class Block(nn.Module):
    """The sum of a spectral map and a pointwise map, and of the U-Net branch of U-FNO if `unet`. `scale` resizes the grid, as in UNO."""

    def __init__(self, inputs: int, outputs: int, modes: int, scale: float = 1, unet: bool = False):
        super().__init__()
        self.spectral = Spectral(inputs, outputs, modes)
        self.pointwise = nn.Conv2d(inputs, outputs, 1)
        self.scale = scale
        self.unet = SmallUNet(outputs) if unet else None

    def forward(self, x: Tensor) -> Tensor:
        size = int(x.shape[-1] * self.scale)
        local = self.pointwise(x)
        if self.scale != 1:
            local = F.interpolate(local, size=(size, size), mode="bilinear", align_corners=False)
        y = self.spectral(x, size) + local
        if self.unet is not None:
            y = y + self.unet(x)
        return F.gelu(y)


class Operator(nn.Module):
    """Lifts three channels to `width`, applies blocks, and projects to one channel."""

    def __init__(self, width: int, blocks: list[Block]):
        super().__init__()
        self.lift = nn.Conv2d(3, width, 1)
        self.blocks = nn.ModuleList(blocks)
        self.project = nn.Sequential(nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.project(x)
        return result


class UNO(nn.Module):
    """Blocks that halve the grid and double the channels, then the reverse with skip connections."""

    def __init__(self, width: int, modes: int):
        super().__init__()
        w = width
        self.lift = nn.Conv2d(3, w, 1)
        self.down = nn.ModuleList([Block(w, 2 * w, modes, 0.5), Block(2 * w, 4 * w, modes // 2, 0.5)])
        self.middle = Block(4 * w, 4 * w, modes // 2)
        self.up = nn.ModuleList([Block(4 * w, 2 * w, modes // 2, 2), Block(4 * w, w, modes, 2)])
        self.project = nn.Sequential(nn.Conv2d(2 * w, 4 * w, 1), nn.GELU(), nn.Conv2d(4 * w, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        first = self.down[0](x)
        y = self.middle(self.down[1](first))
        y = torch.cat([self.up[0](y), first], 1)
        result: Tensor = self.project(torch.cat([self.up[1](y), x], 1))
        return result


def fno(width: int, modes: int) -> nn.Module:
    return Operator(width, [Block(width, width, modes) for _ in range(4)])


def ufno(width: int, modes: int) -> nn.Module:
    return Operator(width, [Block(width, width, modes, unet=i >= 3) for i in range(6)])
