# SPDX-License-Identifier: Apache-2.0
"""Writes exported programs with their results in Python, and checks files that C++ wrote.

exported.py make FOLDER     for each case a CASE.pt2, and CASE.ref: inputs, outputs, gradients, weights of a few steps of SGD
exported.py check FOLDER    compares CASE.{saved.pt2,state,safetensors} with CASE.ref and with each other
"""
import importlib.util
import pathlib
import sys
import warnings

import torch
import torch.nn as nn
from torch.nn.functional import cross_entropy

STEPS = 4
RATE = 0.1
NO_TOKENS = dict(bos_token_id=None, eos_token_id=None)
DIM = torch.export.Dim


class Block(nn.Module):
    def __init__(self, width, heads, p):
        super().__init__()
        self.heads, self.p = heads, p
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(p))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.functional.dropout(self.proj(a.transpose(1, 2).flatten(2)), self.p, self.training)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Language model with a tied head; returns a dict."""

    def __init__(self, width=32, vocabulary=50, length=24, p=0.1):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4, p) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, target):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for b in self.blocks:
            x = b(x)
        logits = self.head(self.norm(x))
        return {"loss": cross_entropy(logits.flatten(0, 1), target.flatten()), "rest": (logits, ids.shape[1])}


class Conv(nn.Module):
    """Residual network with batch norm."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x, y):
        x = self.relu(self.norm1(self.conv1(x)))
        x = self.relu(self.norm2(self.conv2(x)) + x)
        return cross_entropy(self.last(nn.functional.max_pool2d(x, 2).mean((2, 3))), y)


class Buffers(nn.Module):
    """Dropout, written buffers (one of them is not saved), and a constant."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(32), persistent=False)
        self.fixed = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x):
        self.count.add_(1)
        h = self.drop(torch.relu(self.a(x)))
        y = self.b(h + self.mean.clone()) * self.fixed
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return y.view(x.shape[0] * 2, 2).pow(2).mean()


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(8, 12, 2, batch_first=True, dropout=0.2)
        self.last = nn.Linear(12, 1)

    def forward(self, x):
        y, _ = self.layers(x)
        return self.last(y).pow(2).mean() + y[:, -1].where(y[:, -1] > 0, float("-inf")).exp().mean()


class Regions(nn.Module):
    """Regions without gradients, and under autocast."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            t = self.a(x).softmax(-1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                u = self.b(t)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.b(self.a(x))
            with torch.autocast("cpu", enabled=False):
                z = self.a(z.float())
        return ((z - t) ** 2).mean() + (self.b(x).detach() * u.float() * self.a(x)).sum()


class Structured(nn.Module):
    """Keyword arguments, non-tensor arguments and outputs, outputs without a gradient, a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.used, self.unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(2))

    def forward(self, pair, k=3, *, mask=None, scale):
        x, y = pair["x"], pair["y"]
        a, b = torch.split(x, [2, 2], 1)
        i = torch.arange(x.size(0))
        return [(x[i, :] * self.used * self.frozen).sum() * k, None, (torch.cat([b, a], 1) * y * scale.exp()).var(0).sum(), i]


def seeded(make):
    torch.manual_seed(0)
    return make()


def ids(batch, length):
    return torch.randint(50, (batch, length)), torch.randint(50, (batch, length))


def cases():
    """name: (module, arguments of every step, keyword arguments, dynamic shapes); names of decomposed programs end so"""
    torch.manual_seed(1)
    batch, length = DIM("batch", min=2, max=16), DIM("length", min=2, max=24)
    shapes = [(2, 16), (3, 20), (2, 16), (3, 20)]
    images = [(torch.randn(4, 3, 12, 12), torch.randint(4, (4,))) for _ in range(STEPS)]
    vectors = [(torch.randn(6, 16),) for _ in range(STEPS)]
    pairs = [({"x": torch.randn(3, 4), "y": torch.randn(3, 4)},) for _ in range(STEPS)]
    plain = {
        "gpt": (Gpt, [ids(2, 16) for _ in range(STEPS)], None, None),
        "gpt_dynamic": (Gpt, [ids(*s) for s in shapes], None, {"ids": {0: batch, 1: length}, "target": {0: batch, 1: length}}),
        "conv": (Conv, images, None, None),
        "conv_core": (Conv, images, None, None),
        "conv_functional": (Conv, images, None, None),
        "buffers": (Buffers, vectors, None, None),
        "buffers_dynamic": (Buffers, [(torch.randn(b, 16),) for b in (6, 3, 6, 9)], None, {"x": {0: batch}}),
        "buffers_core": (Buffers, vectors, None, None),
        "buffers_functional": (Buffers, vectors, None, None),
        "lstm": (Lstm, [(torch.randn(4, 5, 8),) for _ in range(STEPS)], None, None),
        "regions": (Regions, [(torch.randn(4, 8),) for _ in range(STEPS)], None, None),
        "structured": (Structured, pairs, {"scale": torch.tensor(0.5)}, None),
    }
    if importlib.util.find_spec("transformers"):
        plain["hf_gpt2"] = (hf_gpt2, [(ids(2, 12)[0],) for _ in range(STEPS)], None, None)
        plain["hf_llama"] = (hf_llama, [(ids(2, 12)[0],) for _ in range(STEPS)], None, None)
    return plain


class WithLabels(nn.Module):
    """A language model of `transformers` that returns its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids, use_cache=False)


def hf_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return WithLabels(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=4, **NO_TOKENS)))


def hf_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=64, max_position_embeddings=32)
    heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return WithLabels(LlamaForCausalLM(LlamaConfig(**sizes, **heads, **NO_TOKENS)))


def loss_of(tensors):
    """As in the C++ tests: the sum of the means of all outputs that have a gradient."""
    return sum(t.mean() for t in tensors if t.requires_grad)


def tensors_in(tree):
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def train(module, steps, kwargs, parameters=None, buffers=None):
    """Outputs and gradients of all steps, and the final weights."""
    parameters = parameters or dict(module.named_parameters())
    buffers = buffers or dict(module.named_buffers())
    torch.manual_seed(7)
    optimizer = torch.optim.SGD([p for p in parameters.values() if p.requires_grad], lr=RATE)
    outputs, gradients = [], []
    for args in steps:
        optimizer.zero_grad()
        outputs.append(tensors_in(module(*args, **kwargs)))
        loss_of(outputs[-1]).backward()
        gradients.append({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
        optimizer.step()
    return {
        "outputs": [[t.detach() for t in step] for step in outputs],
        "gradients": gradients,
        "final": {n: t.detach() for n, t in (parameters | buffers).items()},
        "generator": torch.get_rng_state(),
    }


def train_functional(program, steps):
    """`train` for a program without in-place operators.

    The module of such a program cannot run its backward, because batch norm saves a tensor that is overwritten.
    """
    signature, values = program.graph_signature, program.state_dict | program.constants

    def call(*args):
        args = iter(args)
        user = torch.export.graph_signature.InputKind.USER_INPUT
        inputs = [next(args) if s.kind == user else values[s.target] for s in signature.input_specs]
        copied = [t.clone() if s.target in signature.buffers else t for s, t in zip(signature.input_specs, inputs)]
        results = program.graph_module(*copied)
        mutated = len(signature.buffers_to_mutate)
        for new, name in zip(results[:mutated], signature.buffers_to_mutate.values()):
            values[name].detach().copy_(new.detach())
        return results[mutated:]

    return train(call, steps, {}, {n: values[n] for n in signature.parameters}, {n: values[n] for n in signature.buffers})


def make(folder):
    for name, (factory, steps, kwargs, dynamic) in cases().items():
        kwargs = kwargs or {}
        program = torch.export.export(seeded(factory).train(), steps[0], kwargs, dynamic_shapes=dynamic, strict=False)
        functional = name.endswith(("_core", "_functional"))
        if functional:
            program = program.run_decompositions() if name.endswith("_core") else program.run_decompositions({})
        torch.export.save(program, folder / f"{name}.pt2")
        loaded = torch.export.load(folder / f"{name}.pt2")
        result = train_functional(loaded, steps) if functional else train(loaded.module(), steps, kwargs)
        result["inputs"] = [tensors_in((args, kwargs)) for args in steps]
        torch.save(result, folder / f"{name}.ref")
    scripts(folder)


def scripts(folder):
    """TorchScript modules, and their results in eager mode."""
    x, y = torch.randn(4, 3, 12, 12), torch.randint(4, (4,))
    traced = torch.jit.trace(seeded(Conv), (x, y), check_trace=False)
    traced.load_state_dict(seeded(Conv).state_dict())  # tracing ran the module once
    for name, module in (("script", torch.jit.script(seeded(Conv))), ("trace", traced)):
        torch.jit.save(module, folder / f"{name}.jit")
        result = train(seeded(Conv).train(), [(x, y)] * STEPS, {})
        result["inputs"] = [[x, y]] * STEPS
        torch.save(result, folder / f"{name}.jitref")


def check(folder):
    from safetensors.torch import load_file

    def same(what, a, b):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{what}: {a} is not {b}"

    if importlib.util.find_spec("transformers"):
        hf_gpt2(), hf_llama()  # registers their output types with torch.export
    for file in sorted(folder.glob("*.ref")):
        name = file.stem
        final = torch.load(file, weights_only=True)["final"]
        state = torch.load(folder / f"{name}.state", weights_only=True)
        program = torch.export.load(folder / f"{name}.saved.pt2")
        assert set(program.state_dict) == set(state), f"{name}: {set(program.state_dict) ^ set(state)}"
        for key, value in state.items():
            if key in final:
                same(f"{name}: {key} of the state dict", value, final[key])
            same(f"{name}: {key} of the archive", program.state_dict[key], value)
        stored = load_file(folder / f"{name}.safetensors")
        for key, value in stored.items():
            same(f"{name}: {key} of safetensors", value, state[key])
        assert stored, name
        for key, value in program.named_buffers():
            same(f"{name}: {key}, a buffer", value, final[key])
        # The written programs can be trained; decomposed programs only by `train_functional`.
        if not name.endswith(("_core", "_functional")):
            args, kwargs = program.example_inputs
            loss_of(tensors_in(program.module()(*args, **kwargs))).backward()
    gpt = torch.load(folder / "gpt.state", weights_only=True)
    assert gpt["head.weight"].data_ptr() == gpt["tokens.weight"].data_ptr(), "tied weights came apart"
    stored = load_file(folder / "gpt.safetensors")
    assert ("head.weight" in stored) != ("tokens.weight" in stored), "tied weights were written twice"
    from safetensors.torch import load_model

    fresh = Gpt()
    load_model(fresh, folder / "gpt.safetensors")
    same("safetensors, loaded into the model", fresh.tokens.weight, gpt["head.weight"])
    fresh.load_state_dict(gpt)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # TorchScript is deprecated, and modules of torch.nn set attributes during an export
    {"make": make, "check": check}[sys.argv[1]](pathlib.Path(sys.argv[2]))
