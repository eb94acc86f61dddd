#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures time and memory of training steps in Python: eager mode, a checkpoint around every block, torch.compile, `remat.wrap`.

With --fixed it measures costs that do not depend on kernels: the time of a step with many parameters and little work, the time of
`remat.wrap`, the memory of capture and profile, and the memory of gradients while micro-batches accumulate.

All contestants take one step per round, in rotating order. A ratio is the median over rounds of (processor time / processor time of
eager mode in the same round). The meter of the host allocator measures peaks, beyond the bytes held at the start of a step. Gradients
exist before the step and are zeroed in place. "remat at the checkpoint's peak" has a hard budget in bytes.

usage: step.py [--works gpt2,unet,layers,"gpt2 tiny"] [--rounds 7] [--threads 1] [--compile] [--fixed]
"""
import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat import _torch


class Loss(nn.Module):
    """A network and its loss. `blocks` are the modules to checkpoint."""

    def __init__(self, net, loss, blocks):
        super().__init__()
        self.net, self.loss, self.blocks = net, loss, blocks

    def forward(self, *inputs):
        return self.loss(self.net, *inputs)


def language_model(net, ids):
    logits = net(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def translation(net, ids, labels):
    logits = net(input_ids=ids, decoder_input_ids=labels, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def classification(net, images, labels):
    return F.cross_entropy(net(images), labels)


class UNet(nn.Module):
    def __init__(self, width=24, levels=4, classes=4):
        super().__init__()
        sizes = [width << i for i in range(levels + 1)]

        def twice(a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                                 nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

        self.down = nn.ModuleList(twice(a, b) for a, b in zip([3] + sizes, sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(sizes, sizes[1:]))
        self.join = nn.ModuleList(twice(2 * a, a) for a in sizes[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skips = []
        for block in self.down[:-1]:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, join in zip(reversed(self.up), reversed(self.join)):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def gpt2(dropout=0.0, layers=6, width=384, heads=6, vocabulary=8192, batch=(4, 256)):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=256, vocab_size=vocabulary, resid_pdrop=dropout,
                        embd_pdrop=dropout, attn_pdrop=dropout)
    net = GPT2LMHeadModel(config)
    return Loss(net, language_model, list(net.transformer.h)), (torch.randint(vocabulary, batch),)


def layers():
    net = nn.Sequential(*(nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(64, 64), nn.ReLU()))) for _ in range(30)))
    return Loss(net, lambda net, x: net(x).square().mean(), list(net)), (torch.randn(8, 64),)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    net = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, hidden_size=384, intermediate_size=1024, num_attention_heads=6,
                                       vocab_size=8192, max_position_embeddings=256))
    return Loss(net, language_model, list(net.model.layers)), (torch.randint(8192, (4, 256)),)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    net = T5ForConditionalGeneration(T5Config(num_layers=3, d_model=384, d_kv=64, d_ff=1024, num_heads=6, vocab_size=8192,
                                              dropout_rate=0.0))
    ids = torch.randint(8192, (4, 192))
    return Loss(net, translation, list(net.encoder.block) + list(net.decoder.block)), (ids, ids.flip(1))


def resnet50():
    from torchvision.models import resnet50 as make

    net = make(num_classes=100)
    blocks = [block for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for block in layer]
    return Loss(net, classification, blocks), (torch.randn(8, 3, 128, 128), torch.randint(100, (8,)))


def unet():
    net = UNet()
    return Loss(net, classification, [*net.down, *net.join]), (torch.randn(4, 3, 96, 96), torch.randint(4, (4, 96, 96)))


WORKS = {"gpt2": gpt2, "gpt2 dropout": lambda: gpt2(0.1), "llama": llama, "t5": t5, "resnet50": resnet50, "unet": unet}
#: works whose operators take less time than their calls from Python
TINY = {"layers": layers, "gpt2 tiny": lambda: gpt2(layers=12, width=64, heads=4, vocabulary=256, batch=(2, 32))}


def make(name):
    """A work with zero gradients. Each call makes the same weights and inputs."""
    torch.manual_seed(0)
    model, inputs = (WORKS | TINY)[name]()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model, inputs


def checkpointed(model):
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda *a, _f=plain, **k: checkpoint(_f, *a, use_reentrant=False, **k)
    return model


def step(model, inputs):
    """Runs a forward and a backward. Returns the processor time (s) and the peak beyond the bytes held before (bytes)."""
    for p in model.parameters():
        p.grad.zero_()
    before = _torch.meter_reset()
    begin = time.process_time()
    model(*inputs).backward()
    return time.process_time() - begin, _torch.meter_peak() - before


def peak(model, inputs):
    """The largest peak of three steps, in bytes. Before each step, remat releases the memory that it keeps for the next step."""
    found = 0
    for _ in range(3):
        if remat.is_wrapped(model):
            remat.of(model).release()
        found = max(found, step(model, inputs)[1])
    return found


def measure(name, rounds, compiled):
    contestants = {"eager": make(name), "checkpoint per block": make(name)}
    checkpointed(contestants["checkpoint per block"][0])
    peaks = {}
    for who in contestants:
        peaks[who] = peak(*contestants[who])
    budgets = {"remat 100 %": "100%", "remat 50 %": "50%", "remat at the checkpoint's peak": peaks["checkpoint per block"]}
    if compiled:
        model, inputs = make(name)
        contestants["torch.compile"] = torch.compile(model), inputs
        budgets["remat at torch.compile's peak"] = peak(*contestants["torch.compile"])
    for who, budget in budgets.items():
        model, inputs = make(name)
        begin = time.perf_counter()
        if isinstance(budget, str):
            remat.wrap(model, inputs, budget=budget)
        else:
            remat.wrap(model, inputs, planner=remat.Planner(activation_budget=budget, first_limit=20))
        print(f"{name}: {who}: ready in {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        contestants[who] = model, inputs
    for who, (model, inputs) in contestants.items():
        peaks[who] = peak(model, inputs)
    times = {who: [] for who in contestants}
    order = list(contestants)
    for k in range(rounds):
        for who in order[k % len(order):] + order[:k % len(order)]:
            times[who].append(step(*contestants[who])[0])
    for who in contestants:
        ratio = statistics.median(a / b for a, b in zip(times[who], times["eager"]))
        model = contestants[who][0]
        plan = remat.of(model).plan if remat.is_wrapped(model) else None
        told = f"{plan['seconds'] / plan['plain_seconds']:.3f} | {100 * plan['gap']:.2f}" if plan else " | "
        print(f"| {name} | {who} | {peaks[who] / 2**20:.1f} | {peaks[who] / peaks['eager']:.3f} | {ratio:.3f} | {told} |", flush=True)


class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList(nn.Parameter(torch.rand(4)) for _ in range(160))

    def forward(self, x):
        return (x * torch.cat(list(self.list))).sum()


def fixed():
    """Costs of planning and wrapping that do not depend on kernels."""
    x = torch.rand(640)
    wrapped = {f"wrapped, {follow=}": remat.wrap(Parameters(), (x,), planner=remat.Planner(follow=follow)) for follow in (True, False)}
    for who, model in {"plain": Parameters(), **wrapped}.items():
        times = []
        for _ in range(400):
            model.zero_grad()
            begin = time.perf_counter()
            model(x).backward()
            times.append(time.perf_counter() - begin)
        print(f"160 parameters, {who}: {1e6 * statistics.median(times):.0f} us a step")

    _torch.meter_install()
    captured()
    accumulated()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for start in ("cold", "cached"):
            process = multiprocessing.get_context("spawn").Process(target=wrap_gpt2, args=(start, torch.get_num_threads()))
            process.start()
            process.join()


def captured():
    """Memory of capture and profile. The budget is too small for a plan, so the step never runs."""
    for name, work in WORKS.items():
        torch.manual_seed(0)
        model, inputs = work()
        gc.collect()
        before = _torch.meter_reset()
        try:
            remat.wrap(model, inputs, budget=1, cache=False, planner=remat.Planner(time_limit=1))
        except remat.OverBudget as e:
            largest = e.largest
        print(f"{name}: capture and profile take {(_torch.meter_peak() - before) / 2**20:.1f} MiB beyond the model; parameters "
              f"{sum(p.nbytes for p in model.parameters()) / 2**20:.1f} MiB, largest operator {largest}", flush=True)


def accumulated():
    """Peak of a micro-batch that accumulates gradients, beyond parameters and inputs. The model is nearly all parameters."""
    for who in ("eager", "remat"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
        x = torch.rand(2, 1024)
        gc.collect()
        held = _torch.meter_reset()
        if who == "remat":
            remat.wrap(model, (x,))
        for _ in range(3):
            model(x).sum().backward()
        _torch.meter_reset()
        model(x).sum().backward()
        print(f"a micro-batch that adds its gradients, {who}: {(_torch.meter_peak() - held) / (16 * 2**22):.3f} of the parameters' bytes")


def wrap_gpt2(start, threads):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    ids = torch.randint(8192, (4, 128))
    model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_positions=256, vocab_size=8192))
    begin = time.perf_counter()
    remat.wrap(model, kwargs={"input_ids": ids, "labels": ids, "use_cache": False}, budget="75%")
    print(f"GPT-2, 12 layers: remat.wrap in a new process, {start}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile as well (Inductor needs a compiler)")
    parser.add_argument("--fixed", action="store_true", help="the cost of a step without work, and of wrapping")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.fixed:
        sys.exit(fixed())
    _torch.meter_install()
    print("| work | contestant | peak MiB | peak / eager | processor time / eager | predicted | gap % |\n|---|---|---|---|---|---|---|")
    for work in options.works.split(","):
        measure(work, options.rounds, options.compile)
