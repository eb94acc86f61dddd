#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT under a memory limit that the kernel enforces (a memory cgroup, which needs root): in eager mode, and with remat, which
moves activations, gradients, weights and optimizer states to a disk. The kernel kills a process that exceeds the limit.

usage: beyond.py --disk FOLDER [--limit BYTES] [--width N] [--frozen]
without --limit: looks for the smallest limit with which each variant trains
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "quickstart"))

CONFIG = {"vocabulary": 256, "length": 256, "width": 512, "heads": 8, "layers": 8, "dropout": 0.1}
BATCH, STEPS = 8, 3
PATIENCE = 600  # seconds; a process that takes longer reads the same pages again and again
WORKS = ("import torch", "eager", "remat", "remat, weights planned")


def run(work, limit, disk, width, frozen):
    """Trains one variant, in a process of its own, and prints losses and times."""
    import torch

    torch.set_num_threads(1)
    if work == "import torch":
        return print(json.dumps({"losses": [], "seconds": 0}))
    from train import GPT

    base = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
    torch.manual_seed(0)
    model = GPT(**{**CONFIG, "width": width})
    if frozen:  # as with adapters: train small parameters only
        for p in model.parameters():
            p.requires_grad_(p.numel() < 1 << 18)
    trained = [p for p in model.parameters() if p.requires_grad]
    if work == "eager":
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    else:
        import remat

        # 64 MiB beside the step: this package, leftovers of profiling, pages of weights, gradients and states in use or in flight.
        remat.wrap(model, offload=remat.Offload("all", weights="planned" if work.endswith("planned") else "paged"), disk=disk, cache=False,
                   planner=remat.Planner(activation_budget=max(1, limit - base - (64 << 20)), time_limit=5))
        optimizer = remat.optimizer(trained, torch.optim.AdamW, model=model, lr=1e-3)
    losses, seconds = [], []
    for step in range(STEPS):
        torch.manual_seed(step)
        ids = torch.randint(CONFIG["vocabulary"], (BATCH, CONFIG["length"] + 1))
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(ids[:, :-1], labels=ids[:, 1:])["loss"]
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    print(json.dumps({"losses": losses, "seconds": min(seconds[1:])}))


class Group:
    """A memory cgroup, of version 1 or 2, whose processes have no swap."""

    def __init__(self):
        first = pathlib.Path("/sys/fs/cgroup/memory")
        if first.is_dir():
            self.names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        else:
            first = pathlib.Path("/sys/fs/cgroup")
            (first / "cgroup.subtree_control").write_text("+memory")
            self.names = ("memory.max", "memory.swap.max")
        self.folder = first / f"remat-{os.getpid()}"
        self.folder.mkdir()

    def call(self, command, limit):
        """Runs a command under the limit, and returns its JSON; None if it was killed, took too long, or remat has no plan for the limit."""
        maximum, with_swap = (self.folder / n for n in self.names)
        if self.names[0] == "memory.max":
            maximum.write_text(str(limit))
            with_swap.write_text("0")
        else:
            if with_swap.exists():
                with_swap.write_text("-1")
            maximum.write_text(str(limit))
            if with_swap.exists():
                with_swap.write_text(str(limit))
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE,
                                  preexec_fn=lambda: (self.folder / "cgroup.procs").write_text(str(os.getpid())))
        except subprocess.TimeoutExpired:
            return None
        if done.returncode not in (0, -9, 3):
            sys.exit(f"{' '.join(command)} ended with {done.returncode}")
        return json.loads(done.stdout) if done.returncode == 0 else None

    def close(self):
        self.folder.rmdir()


def main(options):
    group = Group()

    def attempt(work, limit):
        found = group.call([sys.executable, __file__, "--run", work, "--limit", str(limit), "--disk", options.disk, "--width",
                            str(options.width), *["--frozen"] * options.frozen], limit)
        print(f"{work}, {limit / 1e6:.0f} MB: {'does not train' if found is None else found}", file=sys.stderr, flush=True)
        return found

    try:
        if options.limit:
            return sys.exit(0 if [attempt(work, options.limit) for work in options.works][-1] else 1)
        losses = None
        for work in options.works:
            low, high, found = 250_000_000, 2_500_000_000, None
            while high > 1.03 * low:
                middle = int((low * high) ** 0.5)
                got = attempt(work, middle)
                low, high, found = (low, middle, got) if got else (middle, high, found)
            if losses and found["losses"] and found["losses"] != losses:
                sys.exit(f"{work}: other losses than in eager mode: {found['losses']}, {losses}")
            losses = losses or found["losses"]
            print(f"| {work} | {high / 1e6:.0f} MB | {found['seconds']:.2f} s a step |", flush=True)
    finally:
        group.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", required=True, help="folder on a disk")
    parser.add_argument("--limit", type=int, help="bytes")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--width", type=int, default=CONFIG["width"], help="of the model")
    parser.add_argument("--frozen", action="store_true", help="train what has less than 2^18 elements only")
    parser.add_argument("--run", choices=WORKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.run:
        main(options)
    else:
        try:
            run(options.run, options.limit, options.disk, options.width, options.frozen)
        except Exception as e:  # remat has no plan for the limit
            if type(e).__name__ not in ("OverBudget", "ValueError"):
                raise
            print(e, file=sys.stderr)
            sys.exit(3)
