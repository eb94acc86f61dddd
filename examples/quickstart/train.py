#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a GPT-2-like model of torch.nn in half of its activation memory, next to the plain model, and compares them bit by bit. It
runs on a GPU if steps can run there. It writes the figures to FOLDER/result.json, and a plot of time against budget to
FOLDER/curve.svg.

usage: train.py TEXT FOLDER [--budget BUDGET] [--steps STEPS]
"""
import argparse
import copy
import json
import pathlib
import sys
import time

import torch
from torch import nn

import remat

#: The host, or the first accelerator that steps can run on.
DEVICE = torch.device([d["device"] for d in remat.devices() if not d["problem"]][:2][-1])
CONFIG = {"vocabulary": 256, "length": 128, "width": 192, "heads": 6, "layers": 4, "dropout": 0.1}


class Block(nn.Module):
    def __init__(self, width, heads, dropout, **_):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.functional.dropout(self.out(y.transpose(1, 2).reshape(b, n, w)), self.dropout, self.training)
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, length, width, layers, **config):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, **config) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def on_cpu():
    return DEVICE.type == "cpu"


def clock():
    """Waits for all work of the device, then returns the time in seconds."""
    if not on_cpu():
        torch.accelerator.synchronize(DEVICE)
    return time.perf_counter()


def generator():
    """The state of the random generator that dropout uses."""
    return torch.get_rng_state() if on_cpu() else torch.get_device_module(DEVICE).get_rng_state(DEVICE)


def batch(text):
    """Inputs and labels of a step."""
    starts = torch.randint(len(text) - CONFIG["length"] - 1, (8,))
    rows = torch.stack([text[s:s + CONFIG["length"] + 1] for s in starts]).to(DEVICE)
    return rows[:, :-1], rows[:, 1:]


def train(model, text, steps, session):
    """Trains the model. Returns the losses and the state of the generator. Of the second half of the steps, also returns the seconds of
    the fastest forward and backward, and the bytes by which the peak exceeds the memory before."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses, times = [], []
    for step in range(steps):
        if step == steps // 2:
            session.release()  # memory() counts the whole process, so free idle arenas first
            session.reset_peak()
            held = session.memory()["peak"]
        ids, labels = batch(text)
        begin = clock()
        optimizer.zero_grad()
        loss = model(ids, labels=labels)["loss"]
        loss.backward()
        times.append(clock() - begin)
        optimizer.step()
        losses.append(loss.item())
    return losses, generator(), min(times[steps // 2:]), session.memory()["peak"] - held


def main():
    parser = argparse.ArgumentParser(description="Trains a GPT-2-like model inside a budget, next to the plain model.")
    parser.add_argument("text", type=pathlib.Path, help="file to learn from")
    parser.add_argument("folder", type=pathlib.Path, help="where result.json and curve.svg go")
    parser.add_argument("--budget", default="50% of activations", help="bytes such as '40 MiB', or a share of the activations (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error(f"--steps must be at least 4, got {options.steps}")
    if not options.text.is_file():
        parser.error(f"there is no file {options.text}")
    text = torch.tensor(list(options.text.read_bytes()))
    torch.manual_seed(0)
    if not on_cpu():
        torch.use_deterministic_algorithms(True, warn_only=True)
    plain = GPT(**CONFIG).to(DEVICE)
    model = copy.deepcopy(plain)
    remat.wrap(model, budget=options.budget, planner=remat.Planner(time_limit=5))  # the only line that a training script needs
    session = remat.of(model)

    losses, state, seconds, peak = train(plain, text, options.steps, session)
    ours, our_state, our_seconds, our_peak = train(model, text, options.steps, session)
    equal = losses == ours and torch.equal(state, our_state) and all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters()))
    print(session.report())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} after {options.steps} steps; "
          f"weights, losses and generator {'equal bit by bit' if equal else 'DIFFER'}")
    print(f"a step takes {our_peak / 2**20:.1f} MiB, the plain model's {peak / 2**20:.1f} MiB: {our_peak / peak:.2f} of its memory, measured")
    print(f"forward and backward take {our_seconds / seconds:.2f} of the plain model's time")

    options.folder.mkdir(parents=True, exist_ok=True)
    result = {"budget": session.memory()["budget"], "peak": our_peak, "plain_peak": peak, "seconds": our_seconds, "plain_seconds": seconds,
              "losses": ours, "equal": equal, **{name: session.plan[name] for name in ("solver", "bound", "gap")}}
    (options.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    remat.curve(plain, batch(text), points=12, time_limit=3).svg(options.folder / "curve.svg")
    print(f"written to {options.folder}: result.json; curve.svg, time at other budgets")
    return not equal


if __name__ == "__main__":
    sys.exit(main())
