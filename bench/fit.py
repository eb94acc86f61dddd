#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How right `remat.fit` is, on this host: for each model the planned and the measured bytes of the arena, the estimated and the measured
peak of eager mode, and the predicted and the measured time of a step; without recomputation and at 60 % of the activations.

Peaks are measured by the meter of the host allocator. A time is the least of `--rounds` steps.

usage: fit.py [--works gpt2,unet] [--rounds 5] [--threads 1]
"""
import argparse
import gc
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
    """Seconds of the fastest step; gradients are there."""
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
            for _ in range(2):  # plans, then moves in
                for p in model.parameters():
                    p.grad = None
                model(*inputs).backward()
        except remat.OverBudget:  # one operator takes more
            cells += ["-"] * 3
            remat.unwrap(model)
            continue
        for p in model.parameters():
            p.grad = None
        session.reset_peak()
        model(*inputs).backward()
        memory = session.memory()
        plan = session.plan
        seconds = timed(model, inputs, rounds)
        cells += [f"{memory['planned']}", f"{memory['peak']}", f"{plan['seconds'] / seconds:.3f}"]
        remat.unwrap(model)
        del session
        gc.collect()  # the next one measures from what is held now
    print("| " + " | ".join(cells) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--works", default=",".join(ALL))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    _torch.meter_install()
    print("| model | eager peak, estimated / measured | planned, bytes | measured | time, predicted / measured | at 60 %: planned | measured | time |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.works.split(","):
        row(name, given.rounds)


if __name__ == "__main__":
    main()
