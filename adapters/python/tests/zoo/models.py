# SPDX-License-Identifier: Apache-2.0
"""The models of the zoo: common architectures in tiny sizes, with random weights."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Entry(NamedTuple):
    """Functions that make a model and its batches."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Any]]
    large: bool = False  #: True for models that only REMAT_FULL=1 trains


ZOO: dict[str, Entry] = {}


def entry(batch: Callable[[torch.Generator], dict[str, Any]], large: bool = False):
    """Decorator that adds a function to the zoo. The function makes the model."""

    def add(make):
        ZOO[make.__name__] = Entry(make, batch, large)
        return make

    return add


# --- images --------------------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A network with its loss inside the model, so that the budget covers the whole step."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x, target):
        y = self.network(x)
        losses = [F.cross_entropy(t, target) for t in (y if isinstance(y, tuple) else (y,)) if t is not None]
        return {"loss": sum(losses), "logits": y}


def images(n: int, size: int, classes: int = 5):
    return lambda g: {"x": torch.randn(n, 3, size, size, generator=g), "target": torch.randint(0, classes, (n,), generator=g)}


def vision(name: str, **options) -> nn.Module:
    import torchvision

    return Classifier(getattr(torchvision.models, name)(num_classes=5, **options))


@entry(images(4, 64))
def resnet18():
    return vision("resnet18")


@entry(images(2, 64), large=True)
def resnet50():
    return vision("resnet50")


@entry(images(8, 64))
def mobilenet_v3_small():
    return vision("mobilenet_v3_small")


@entry(images(2, 32))
def densenet():
    import torchvision

    return Classifier(torchvision.models.DenseNet(growth_rate=8, block_config=(2, 3, 3, 2), num_init_features=16, num_classes=5,
                                                  drop_rate=0.1))


@entry(images(2, 64), large=True)
def densenet121():
    return vision("densenet121")


@entry(images(2, 32), large=True)
def convnext_tiny():
    return vision("convnext_tiny")


@entry(images(2, 32))
def convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return Classifier(ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], stochastic_depth_prob=0.2, num_classes=5))


@entry(images(8, 96), large=True)
def swin_t():
    return vision("swin_t")


@entry(images(2, 32))
def swin():
    import torchvision

    return Classifier(torchvision.models.SwinTransformer(
        patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], dropout=0.1, attention_dropout=0.1,
        stochastic_depth_prob=0.2, num_classes=5))


@entry(images(2, 32))
def vit():
    import torchvision

    return Classifier(torchvision.models.VisionTransformer(image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=16,
                                                           mlp_dim=32, dropout=0.1, attention_dropout=0.1, num_classes=5))


@entry(images(2, 64))
def googlenet():
    return vision("googlenet", aux_logits=False, init_weights=False)


@entry(images(8, 96), large=True)
def googlenet_with_heads():
    return vision("googlenet", aux_logits=True, init_weights=False)


class UNet(nn.Module):
    """A U-Net: encoder and decoder with skip connections, group norms, dropout and upsampling."""

    def __init__(self, width: int = 8, depth: int = 3):
        super().__init__()
        sizes = [3] + [width << i for i in range(depth)]
        self.down = nn.ModuleList(self.block(a, b) for a, b in zip(sizes, sizes[1:]))
        self.up = nn.ModuleList(self.block(a + b, b) for a, b in zip(sizes[:1:-1], sizes[-2:0:-1]))
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU(inplace=True), nn.Dropout(0.1),
                             nn.Conv2d(b, b, 3, padding=1), nn.ReLU(inplace=True))

    def forward(self, x, target):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = skips.pop()
        for block in self.up:
            skip = skips.pop()
            x = block(torch.cat([F.interpolate(x, size=skip.shape[2:], mode="bilinear"), skip], 1))
        y = self.head(x)
        return {"loss": F.mse_loss(y, target), "image": y}


@entry(lambda g: {"x": torch.randn(2, 3, 16, 16, generator=g), "target": torch.randn(2, 3, 16, 16, generator=g)})
def unet():
    return UNet()


# --- sequences -----------------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Embedding, two bidirectional recurrent layers with dropout between them, and a head with its own weights."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.rnn = kind(12, 10, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)
        self.head = nn.Linear(20, 20)

    def forward(self, ids):
        y, _ = self.rnn(self.embedding(ids))
        logits = self.head(y)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), "logits": logits}


def ids(n: int, length: int, words: int = 50, **more):
    def batch(g):
        x = torch.randint(0, words, (n, length), generator=g)
        return {name: (x if value == "ids" else value(g, x)) for name, value in ({"input_ids": "ids", "labels": "ids"} | more).items()}

    return batch


def padded(g, x):
    """The attention mask of sequences of random lengths."""
    length = torch.randint(x.shape[1] // 2, x.shape[1] + 1, (x.shape[0], 1), generator=g)
    length[0] = x.shape[1]
    return (torch.arange(x.shape[1]) < length).long()


@entry(lambda g: {"ids": torch.randint(0, 20, (8, 24), generator=g)})
def lstm():
    return Recurrent()


@entry(lambda g: {"ids": torch.randint(0, 20, (3, 9), generator=g)})
def gru():
    return Recurrent(nn.GRU)


class Shared(nn.Module):
    """One block applied several times, as in ALBERT, and a head that shares the weights of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for _ in range(4):
            x = self.block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@entry(lambda g: {"ids": torch.randint(0, 20, (3, 9), generator=g)})
def shared_blocks():
    return Shared()


@entry(ids(2, 12))
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=16))


@entry(ids(2, 12, attention_mask=padded))
def gpt2_padded():
    return gpt2()


def llama_config(**more):
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
                       num_key_value_heads=2, max_position_embeddings=32, **more)


@entry(ids(2, 12, attention_mask=padded))
def llama():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(llama_config(tie_word_embeddings=True))


@entry(ids(2, 12))
def llama_eager_attention():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(llama_config(attn_implementation="eager", attention_dropout=0.1))


@entry(ids(2, 12, attention_mask=padded))
def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
                                      intermediate_size=32, max_position_embeddings=16))


@entry(ids(2, 12, attention_mask=padded, labels=lambda g, x: x[:, :7].contiguous()))
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                                               decoder_start_token_id=0))


@entry(lambda g: {"pixel_values": torch.randn(2, 3, 16, 16, generator=g), "labels": torch.randint(0, 2, (2,), generator=g)})
def hf_vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
                                               image_size=16, patch_size=4, hidden_dropout_prob=0.1))


@entry(lambda g: {"input_features": torch.randn(2, 8, 24, generator=g), "labels": torch.randint(0, 40, (2, 6), generator=g)})
def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=50, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, d_model=16, max_source_positions=12, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.1, begin_suppress_tokens=None))


def mixtral_with(experts):
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32, output_router_logits=True,
        experts_implementation=experts))


@entry(ids(2, 12))
def mixtral():
    return mixtral_with("grouped_mm")


@entry(ids(2, 12), large=True)
def mixtral_batched():
    return mixtral_with("batched_mm")
