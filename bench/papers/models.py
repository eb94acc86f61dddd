# SPDX-License-Identifier: Apache-2.0
"""The models of the papers in three sizes: `paper` for computed tables, `host` for measurements on a processor, `tiny` for tests.

A model returns its loss. Sizes `paper` that the abstract of a paper does not give are our choice.
"""
from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any, Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import operators  # noqa: E402
import vision  # noqa: E402
from step import Loss, UNet, classification, language_model  # noqa: E402

SIZES = ("tiny", "host", "paper")
Data = Callable[..., tuple[Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class Work:
    """A model in all sizes. `make(**sizes[size])` makes the network, `data(batch, device, **sizes[size])` the inputs of a step."""

    make: Callable[..., nn.Module]
    loss: Callable[..., Tensor]
    data: Data
    sizes: Mapping[str, Mapping[str, Any]]
    batches: Mapping[str, int]
    on_host: bool = False  #: True if the constructor reads data, so it cannot run on `meta`


WORKS: dict[str, Work] = {}


def build(name: str, size: str, *, device: str = "cpu", batch: int | None = None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and the arguments of a step. Each call makes the same weights and data. Raises ValueError for an unknown name or size."""
    if name not in WORKS:
        raise ValueError(f"model {name!r} is unknown; known are {', '.join(WORKS)}")
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown; known are {', '.join(SIZES)}")
    work = WORKS[name]
    torch.manual_seed(0)
    with torch.device("cpu" if work.on_host else device):
        net = work.make(**work.sizes[size])
    model = Loss(net, work.loss, []).to(device)
    return model, inputs(name, size, device=device, batch=batch)


def inputs(name: str, size: str, *, device: str = "cpu", batch: int | None = None) -> tuple[Tensor, ...]:
    """The arguments of a step."""
    work = WORKS[name]
    return work.data(work.batches[size] if batch is None else batch, device, **work.sizes[size])


# --- data and losses -----------------------------------------------------------------------------------------------------------


def images(batch: int, device: str, image: int = 224, classes: int = 1000, **_: Any) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, image, image, device=device), torch.randint(classes, (batch,), device=device)


def maps(batch: int, device: str, height: int, classes: int, across: int = 0, **_: Any) -> tuple[Tensor, ...]:
    """Images with a class per pixel."""
    shape = (height, across or height)
    return torch.randn(batch, 3, *shape, device=device), torch.randint(classes, (batch, *shape), device=device)


def fields(batch: int, device: str, grid: int, **_: Any) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, grid, grid, device=device), torch.randn(batch, 1, grid, grid, device=device)


def tokens(batch: int, device: str, words: int, length: int, **_: Any) -> tuple[Tensor, ...]:
    return (torch.randint(words, (batch, length), device=device),)


def pairs(batch: int, device: str, words: int, length: int, **_: Any) -> tuple[Tensor, ...]:
    source, target = (torch.randint(words, (batch, length), device=device) for _ in range(2))
    return source, target


def regression(net: nn.Module, x: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(net(x), wanted)


def translation(net: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    scores = net(source, target)
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), target[:, 1:].flatten())


# --- networks ------------------------------------------------------------------------------------------------------------------


def resnet(depths: tuple[int, ...], width: int, classes: int, **_: Any) -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    net: nn.Module = ResNet(Bottleneck, list(depths), classes, width_per_group=width)
    return net


def regnet(kind: str, classes: int, **_: Any) -> nn.Module:
    import torchvision

    net: nn.Module = getattr(torchvision.models, kind)(num_classes=classes)
    return net


def transformers_model(kind: str, **fixed: Any) -> Callable[..., nn.Module]:
    """A function that makes a causal language model of transformers. It translates `width`, `depth` and `heads` to the names of `kind`."""

    def make(words: int, length: int, width: int, depth: int, heads: int, **options: Any) -> nn.Module:
        import transformers

        names = ("n_embd", "n_layer", "n_head") if kind == "GPT2" else ("hidden_size", "n_layer", "n_head") if kind == "Bloom" else \
            ("hidden_size", "num_hidden_layers", "num_attention_heads")
        places = {} if kind == "Bloom" else {"n_positions" if kind == "GPT2" else "max_position_embeddings": length}
        config = getattr(transformers, kind + "Config")(vocab_size=words, **dict(zip(names, (width, depth, heads))), **places, **fixed, **options)
        net: nn.Module = getattr(transformers, kind + ("LMHeadModel" if kind == "GPT2" else "ForCausalLM"))(config)
        return net

    return make


def add(name: str, make: Callable[..., nn.Module], loss: Callable[..., Tensor], data: Data, sizes: list[dict[str, Any]], batches: tuple[int, int, int],
        on_host: bool = False) -> None:
    WORKS[name] = Work(make, loss, data, dict(zip(SIZES, sizes)), dict(zip(SIZES, batches)), on_host)


def u_net(width: int, levels: int, classes: int, **_: Any) -> nn.Module:
    net: nn.Module = UNet(width, levels, classes)
    return net


def sized(make: Callable[..., nn.Module], *names: str) -> Callable[..., nn.Module]:
    """A function that calls `make` with the entries `names` of a size."""
    return lambda **size: make(**{n: size[n] for n in names})


_SMALL = [{"image": 32, "classes": 5}, {"image": 96, "classes": 100}, {"image": 224, "classes": 1000}]
_PIXELS = [{"height": 32, "classes": 4}, {"height": 96, "classes": 4}, {"height": 416, "across": 608, "classes": 21}]
_WIDTHS = [{"width": 8}, {"width": 16}, {"width": 64}]


def _both(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**x, **y} for x, y in zip(a, b, strict=True)]


_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_TEXT = [{"words": 97, "length": 16, "width": 32, "depth": 2, "heads": 2}, {"words": 4096, "length": 128, "width": 256, "depth": 6, "heads": 4}]
add("GPT-2", transformers_model("GPT2", bos_token_id=0, eos_token_id=0, **_NO_DROPOUT), language_model, tokens,
    [*_TEXT, {"words": 50257, "length": 1024, "width": 1024, "depth": 24, "heads": 16}], (2, 4, 8))
for _name, _depths in (("ResNet-101", (3, 4, 23, 3)), ("ResNet-50", (3, 4, 6, 3))):
    add(_name, resnet, classification, images, _both(_SMALL, [{"depths": (1, 1, 2, 1), "width": 8}, *[{"depths": _depths, "width": 64}] * 2]), (4, 8, 64))
add("RegNet-32", regnet, classification, images, _both(_SMALL, [{"kind": "regnet_y_" + k} for k in ("400mf", "1_6gf", "32gf")]), (2, 4, 64), on_host=True)
for _name, _times in (("VGG16", (2, 2, 3, 3, 3)), ("VGG19", (2, 2, 4, 4, 4))):
    add(_name, sized(vision.vgg, "width", "times", "image", "classes"), classification, images, _both(_SMALL, [{"width": w, "times": _times} for w in (8, 16, 64)]),
        (2, 4, 64))
add("U-Net", u_net, classification, maps, _both(_PIXELS, [{"width": w, "levels": 4 if w > 8 else 2} for w in (8, 16, 64)]), (2, 4, 8))
add("FCN8", sized(vision.FCN8, "width", "classes"), classification, maps, _both(_PIXELS, _WIDTHS), (1, 2, 8))
add("SegNet", sized(vision.SegNet, "width", "classes"), classification, maps, _both(_PIXELS, _WIDTHS), (1, 2, 8))
add("MobileNet", sized(vision.mobilenet, "width", "classes"), classification, images, _both(_SMALL, [{"width": 8}, {"width": 16}, {"width": 32}]), (4, 8, 64))
add("MLP-Mixer", sized(vision.Mixer, "image", "patch", "width", "depth", "classes"), classification, images,
    _both(_SMALL, [{"patch": 8, "width": 16, "depth": 2}, {"patch": 16, "width": 128, "depth": 8}, {"patch": 16, "width": 768, "depth": 12}]), (2, 8, 64))
add("Transformer", lambda words, length, width, depth, heads: vision.Translator(words, width, depth, heads, length), translation, pairs,
    [_TEXT[0], {**_TEXT[1], "depth": 3}, {"words": 32000, "length": 512, "width": 512, "depth": 6, "heads": 8}], (2, 4, 32))
_GRIDS = [{"grid": 16, "width": 4, "modes": 4}, {"grid": 64, "width": 16, "modes": 8}, {"grid": 256, "width": 32, "modes": 24}]
add("FNO", sized(operators.fno, "width", "modes"), regression, fields, _GRIDS, (2, 4, 16))
add("U-FNO", sized(operators.ufno, "width", "modes"), regression, fields, _GRIDS, (2, 4, 16))
add("UNO", sized(operators.UNO, "width", "modes"), regression, fields, _GRIDS, (2, 4, 16))
_LARGE = {"words": 32000, "length": 2048, "width": 2048, "depth": 24, "heads": 16}
add("Llama-like", transformers_model("Llama"), language_model, tokens,
    [{**_TEXT[0], "intermediate_size": 64}, {**_TEXT[1], "intermediate_size": 704}, {**_LARGE, "intermediate_size": 5504}], (2, 4, 4))
add("Mistral-like", transformers_model("Mistral", num_key_value_heads=2), language_model, tokens,
    [{**_TEXT[0], "intermediate_size": 64}, {**_TEXT[1], "intermediate_size": 704}, {**_LARGE, "intermediate_size": 7168}], (2, 4, 4))
add("Phi-like", transformers_model("Phi", pad_token_id=0, bos_token_id=1, eos_token_id=2), language_model, tokens,
    [{**_TEXT[0], "intermediate_size": 64}, {**_TEXT[1], "intermediate_size": 1024}, {**_LARGE, "intermediate_size": 8192}], (2, 4, 4))
add("Bloom-like", transformers_model("Bloom"), language_model, tokens, [*_TEXT, _LARGE], (2, 4, 4))
