#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures time and memory of training steps that offload activations to a disk.

Contestants: eager mode; `saved_tensors_hooks` that offload all saved tensors (a thread writes them, the backward waits for reads);
`remat.wrap` without and with the disk, in the same budget. All contestants take one step per round, in rotating order. A ratio is
the median over rounds of (wall time / wall time of eager mode in the same round). `achieved` is the shortest and the median time of
a step, relative to the time of its plan, which is a sum of shortest times. The meter of the host allocator measures peaks, beyond
the bytes held at the start of a step.

usage: disk.py FOLDER [--works gpt2,unet] [--budget 50%] [--rounds 7] [--threads 1]
"""
import argparse
import concurrent.futures
import os
import statistics
import time

import torch
from step import WORKS, make, peak

import remat
from remat import _torch


class MoveAll:
    """Makes autograd keep its saved tensors in a file, except parameters and tensors below 64 KiB."""

    def __init__(self, model, folder):
        self.file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        self.writer = concurrent.futures.ThreadPoolExecutor(1)
        self.stay = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.end = self.moved = 0

    def pack(self, t):
        if t.nbytes < 1 << 16 or t.untyped_storage().data_ptr() in self.stay:
            return t
        data = t.detach().contiguous()
        place, self.end = self.end, self.end + data.nbytes
        self.moved += 2 * data.nbytes
        written = self.writer.submit(os.pwrite, self.file, data.view(torch.uint8).flatten().numpy(), place)
        return written, place, t.shape, t.dtype

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        written, place, shape, dtype = packed
        written.result()
        t = torch.empty(shape, dtype=dtype)
        os.preadv(self.file, [t.view(torch.uint8).flatten().numpy()], place)
        return t

    def wrap(self, model):
        plain = model.forward

        def forward(*args):
            self.end = self.moved = 0
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                return plain(*args)

        model.forward = forward
        return model


def measure(name, folder, budget, rounds):
    contestants = {who: make(name) for who in ("eager", "move all", "remat", "remat, disk")}
    hooks = MoveAll(contestants["move all"][0], folder)
    hooks.wrap(contestants["move all"][0])
    remat.wrap(*contestants["remat"], budget=budget)
    remat.wrap(*contestants["remat, disk"], budget=budget, offload="activations", disk=folder)
    peaks = {who: peak(*contestant) for who, contestant in contestants.items()}
    times = {who: [] for who in contestants}
    order = list(contestants)
    for k in range(rounds):
        for who in order[k % len(order):] + order[:k % len(order)]:
            model, inputs = contestants[who]
            model.zero_grad(set_to_none=False)  # outside the timed step, because the plan does not include it
            begin = time.perf_counter()
            model(*inputs).backward()
            times[who].append(time.perf_counter() - begin)
    for who, (model, _) in contestants.items():
        ratio = statistics.median(a / b for a, b in zip(times[who], times["eager"]))
        achieved, moved = "", hooks.moved if who == "move all" else 0
        if remat.is_wrapped(model):
            planned, memory = remat.of(model).plan["seconds"], remat.of(model).memory()
            achieved, moved = f"{min(times[who]) / planned:.3f} to {statistics.median(times[who]) / planned:.3f}", memory["to_disk"] + memory["from_disk"]
        print(f"| {name} | {who} | {peaks[who] / 2**20:.1f} | {ratio:.3f} | {achieved} | {moved / 2**20:.0f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="on the disk")
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    _torch.meter_install()
    print("| work | contestant | peak MiB | time / eager | achieved | MiB moved a step |\n|---|---|---|---|---|---|")
    for work in options.works.split(","):
        measure(work, options.folder, options.budget, options.rounds)
