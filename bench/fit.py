#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the accuracy of `remat.fit` on this host.

Per model it compares the estimated with the measured peak of eager mode. For budgets of 100 % and 60 % of the activations it compares
the planned with the measured bytes, and the predicted with the measured time of a step.
Measured bytes are model and inputs plus the bytes that a step adds, by the meter of the host allocator. A time is the shortest of
`--rounds` steps. With --large it prints time and memory of planning for Llamas of one and seven billion parameters on `meta`.

usage: fit.py [--works gpt2,unet] [--rounds 5] [--threads 1] [--large]
"""
import argparse
import gc
import resource
import time

import torch
from step import WORKS, Loss, classification

import remat
from remat import _torch


def vision(name, size=96, batch=4):
    def make():
        import torchvision

        net = getattr(torchvision.models, name)(num_classes=100)
        return Loss(net, classification, []), (torch.randn(batch, 3, size, size), torch.randint(100, (batch,)))

    return make


ALL = {**WORKS, "vgg16": vision("vgg16"), "mobilenet_v2": vision("mobilenet_v2"), "convnext_tiny": vision("convnext_tiny"), "vit_b_16": vision("vit_b_16", 224, 2)}


def timed(model, inputs, rounds):
    """Seconds of the fastest step. Gradients accumulate."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        model(*inputs).backward()
        best = min(best, time.perf_counter() - begin)
    return best


def row(name, rounds):
    torch.manual_seed(0)
    model, inputs = ALL[name]()
    before = _torch.meter_reset()
    model(*inputs).backward()
    eager = _torch.meter_peak() - before
    for p in model.parameters():
        p.grad = None
    found = remat.fit(model, inputs)
    estimate = found.eager_peak - sum(found.sizes[k] for k in ("parameters", "buffers", "inputs", "optimizer"))
    cells = [name, f"{estimate / eager:.3f}"]
    for budget in ("100%", "60%"):
        for p in model.parameters():
            p.grad = None
        remat.wrap(model, budget=budget, cache=False)
        session = remat.of(model)
        try:
            for _ in range(2):  # warm-up; the first step plans
                for p in model.parameters():
                    p.grad = None
                model(*inputs).backward()
        except remat.OverBudget:  # a single operator exceeds the budget
            cells += ["-"] * 3
            remat.unwrap(model)
            continue
        for p in model.parameters():
            p.grad = None
        session.release()
        before = _torch.meter_reset()
        model(*inputs).backward()
        measured = _torch.meter_peak() - before + sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *inputs))
        planned, plan = session.memory()["planned"], session.plan
        seconds = timed(model, inputs, rounds)
        cells += [f"{planned}", f"{measured}", f"{plan['seconds'] / seconds:.3f}"]
        remat.unwrap(model)
        del session
        gc.collect()  # frees the session before the next measurement starts
    print("| " + " | ".join(cells) + " |", flush=True)


def llama(width, inner, layers, groups):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=groups,
                         use_cache=False)
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def text(batch, length=2048):
    tokens = torch.zeros(batch, length, dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def large():
    print("| parameters, 10^9 | tokens | remat.plan, s | memory of the process, MiB | remat.fit, s | remat.largest, s |\n|---|---|---|---|---|---|")
    for shape in ((2048, 5632, 22, 4), (4096, 11008, 32, 32)):
        model, inputs = llama(*shape), text(4)
        begin = time.perf_counter()
        remat.plan(model, kwargs=inputs, budget="70% of activations", device="h100-sxm")
        planned = time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        remat.fit(model, kwargs=inputs, device="h100-sxm", optimizer="adamw")
        fitted = time.perf_counter()
        remat.largest(text, model, device="h200", optimizer="adamw")
        print(f"| {sum(p.numel() for p in model.parameters()) / 1e9:.2f} | 4 x 2048 | {planned - begin:.1f} | {peak} | "
              f"{fitted - planned:.1f} | {time.perf_counter() - fitted:.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--works", default=",".join(ALL))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--large", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.large:
        return large()
    _torch.meter_install()
    print("| model | eager peak, estimated / measured | planned, bytes | measured | time, predicted / measured | at 60 %: planned | measured | time |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.works.split(","):
        row(name, given.rounds)


if __name__ == "__main__":
    main()
