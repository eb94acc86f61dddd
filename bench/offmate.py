#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains on an accelerator with weights in host memory. Compares time with plan, memory with budget, and results with plain training.

A GPT trains on the device of REMAT_TEST_DEVICE (`adapters/python/tests/emulated.py`). On an emulated device, `--links` sets the time to
fetch all weights twice, as a share of the time of a plain step. Times are medians of wall times of forward and backward. Kernels of an
emulated device run at a fixed `pace`, so other load on the machine hardly matters.

usage: offmate.py [--links 0.1,1] [--interference 0,200] [--budget "70% of activations"] [--steps 9]
"""
import argparse
import gc
import pathlib
import statistics
import sys
import time

import torch

import remat

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "adapters/python/tests"))
import emulated  # noqa: E402
from devices import DEVICE, Gpt  # noqa: E402

PACE = 40 << 20  # bytes per second


def run(options, steps):
    """Trains a model. Returns (loss and parameters, median seconds of forward and backward, session). The session is None if `options` is None."""
    torch.manual_seed(1)
    model, x = Gpt(256), torch.randint(0, 50, (2, 16))
    if options is None:
        model, x = model.to(DEVICE), x.to(DEVICE)
    else:
        remat.wrap(model, device=DEVICE, offload="all", cache=False, **options)
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=False)
    times = []
    for k in range(steps + 2):
        optimizer.zero_grad()
        if k == 2:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = model(x)
        loss.backward()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
        optimizer.step()
    left = [t.detach().cpu() for t in (loss, *model.parameters())]
    return left, statistics.median(times[2:]), remat.of(model) if options is not None else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--links", default="0.1,1")
    parser.add_argument("--interference", default="0,200")
    parser.add_argument("--budget", default="70% of activations")
    parser.add_argument("--steps", type=int, default=9)
    told = parser.parse_args()
    emulated.set_option("pace", PACE)
    plain, plain_seconds, _ = run(None, told.steps)
    moved = sum(p.nbytes for p in plain[1:])
    print(f"plain step {plain_seconds:.3f} s, weights {moved / 2**20:.1f} MiB")
    print("| link's time / kernels' time | interference, ‰ | planned, s | achieved, s | achieved / planned | planned / plain | peak / budget | bits |")
    print("|---|---|---|---|---|---|---|---|")
    for part in (float(text) for text in told.links.split(",")):
        for interference in (int(text) for text in told.interference.split(",")):
            emulated.set_option("link", int(2 * moved / (part * plain_seconds)))
            emulated.set_option("interference", interference)
            gc.collect()
            before = torch.accelerator.memory_allocated()
            left, seconds, session = run({"budget": told.budget}, told.steps)
            peak = torch.accelerator.max_memory_allocated() - before
            plan, memory = session.plan, session.memory()
            same = all(torch.equal(a, b) for a, b in zip(plain, left, strict=True)) and not emulated.races()
            print(f"| {part} | {interference} | {plan['seconds']:.3f} | {seconds:.3f} | {seconds / plan['seconds']:.3f} "
                  f"| {plan['seconds'] / plain_seconds:.3f} | {peak / memory['budget']:.3f} | {'equal' if same else 'DIFFER'} |", flush=True)
    emulated.set_option("link", 0)
    emulated.set_option("interference", 0)


if __name__ == "__main__":
    sys.exit(main())
