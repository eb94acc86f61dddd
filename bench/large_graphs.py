#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes training graphs of thousands of operations as benchmarks for solvers: forward, loss, and backward with a gradient per weight.

Costs come from a roofline: 4 us + max(bytes / (800 GB/s), floating-point operations / (60 TFlop/s)). Numbers have 32 bits. Equal
arguments give equal files.

    python3 bench/large_graphs.py DIRECTORY [KIND ...]     # llama, unet, resnet, encoder_decoder, random_dag
"""
import json
import pathlib
import random
import sys


class Tape:
    """Records operations, and for each operation the functions that compute the gradients of its inputs."""

    def __init__(self, name):
        self.name, self.values, self.operations, self.targets, self.tape = name, [], [], [], []

    def value(self, name, numbers, held=False):
        self.values.append({"name": name, "bytes": int(numbers) * 4, "held": held})
        return len(self.values) - 1

    def size(self, v):
        return self.values[v]["bytes"] // 4

    def run(self, kind, inputs, outputs, flops=0):
        """Appends an operation without a gradient. Returns its output values."""
        made = [self.value(f"{kind}{len(self.operations)}", n) for n in outputs]
        moved = 4 * sum(self.size(v) for v in set(inputs) | set(made))
        self.operations.append({"name": f"{kind}_{len(self.operations)}", "inputs": sorted(set(inputs)), "outputs": made,
                                "seconds": float(f"{4e-6 + max(moved / 8e11, flops / 6e13):.4g}"), "workspace": 0, "kind": kind})
        return made

    def op(self, kind, inputs, numbers, saved, flops=0):
        """Appends an operation with a gradient per input. The gradient reads the incoming gradient and `saved`: 'x' inputs, 'y' output, '' nothing."""
        y = self.run(kind, inputs, [numbers], flops)[0]
        reads = {"x": list(inputs), "y": [y], "": []}[saved]
        self.tape.append((y, [(v, lambda dy, v=v: self.run("d" + kind, [dy, *reads], [self.size(v)], flops)[0]) for v in inputs]))
        return y

    def product(self, kind, a, b, numbers, flops):
        """Appends an operation of two operands, such as a product. The gradient of each operand reads the other operand."""
        y = self.run(kind, [a, b], [numbers], flops)[0]
        self.tape.append((y, [(a, lambda dy: self.run("d" + kind, [dy, b], [self.size(a)], flops)[0]),
                              (b, lambda dy: self.run("d" + kind, [dy, a], [self.size(b)], flops)[0])]))
        return y

    def add(self, a, b):
        y = self.run("add", [a, b], [self.size(a)])[0]
        self.tape.append((y, [(a, lambda dy: dy), (b, lambda dy: dy)]))
        return y

    def weight(self, name, numbers):
        return self.value(name, numbers, held=True)

    def linear(self, x, name, rows, width, out):
        return self.product("mm", x, self.weight(name, width * out), rows * out, 2 * rows * width * out)

    def backward(self, loss):
        gradient = {loss: self.run("loss", [loss], [self.size(loss)])[0]}
        for y, inputs in reversed(self.tape):
            if y not in gradient:
                continue
            for v, rule in inputs:
                if self.values[v]["held"] and not self.values[v]["name"].startswith("w"):
                    continue
                d = rule(gradient[y])
                gradient[v] = self.run("accumulate", [gradient[v], d], [self.size(v)])[0] if v in gradient else d
        self.targets = sorted({d for v, d in gradient.items() if self.values[v]["name"].startswith("w")})

    def document(self):
        return {"format": "remat-problem", "version": 1, "name": self.name, "values": self.values, "operations": self.operations,
                "targets": self.targets}


def norm(t, x, rows, width, name):
    square = t.op("pow", [x], rows * width, "x")
    scale = t.op("rsqrt", [t.op("add_eps", [t.op("mean", [square], rows, "")], rows, "")], rows, "y")
    return t.product("mul", t.product("mul", x, scale, rows * width, 0), t.weight("w" + name, width), rows * width, 0)


def attention(t, x, source, rows, others, width, heads, tables, batch=4):
    """Multi-head attention of `x` over `source`, with rotary embeddings. rows, others: rows of `x` and `source` in the whole batch."""

    def rotated(x, n):
        turned = t.op("cat", [t.op("neg", [x], n * width // 2, ""), x], n * width, "")
        return t.op("clone", [t.add(t.op("rope", [x, tables], n * width, ""), t.op("rope", [turned, tables], n * width, ""))],
                    n * width, "")

    q, k = rotated(t.linear(x, "wq", rows, width, width), rows), rotated(t.linear(source, "wk", others, width, width), others)
    v = t.op("clone", [t.linear(source, "wv", others, width, width)], others * width, "")
    scores = heads * rows * others // batch
    s = t.product("bmm", q, k, scores, 2 * rows * others * width // batch)
    s = t.op("softmax", [t.op("mask", [t.op("scale", [s], scores, "")], scores, "")], scores, "y")
    y = t.op("clone", [t.product("bmm", s, v, rows * width, 2 * rows * others * width // batch)], rows * width, "")
    return t.linear(y, "wo", rows, width, width)


def gated(t, x, rows, width, hidden):
    gate = t.op("silu", [t.linear(x, "wg", rows, width, hidden)], rows * hidden, "x")
    return t.linear(t.product("mul", gate, t.linear(x, "wu", rows, width, hidden), rows * hidden, 0), "wd", rows, hidden, width)


def llama(layers=32, width=2048, rows=4096, heads=16, hidden=5504):
    t = Tape(f"llama layers={layers} d={width}")
    tables, x = t.value("rope", 1024 * 128, True), t.run("embed", [t.value("tokens", rows, True)], [rows * width])[0]
    for i in range(layers):
        h = norm(t, x, rows, width, "n")
        x = t.add(x, attention(t, h, h, rows, rows, width, heads, tables))
        x = t.add(x, gated(t, norm(t, x, rows, width, "n"), rows, width, hidden))
    t.backward(t.linear(norm(t, x, rows, width, "n"), "wl", rows, width, 8192))
    return t


def encoder_decoder(layers=12, width=768, rows=3072, others=2048, heads=12):
    t = Tape(f"encoder_decoder layers={layers}")
    tables, x = t.value("rope", 1024 * 64, True), t.run("embed", [t.value("source", rows, True)], [rows * width])[0]
    for i in range(layers):
        h = norm(t, x, rows, width, "n")
        x = t.add(x, attention(t, h, h, rows, rows, width, heads, tables))
        x = t.add(x, gated(t, norm(t, x, rows, width, "n"), rows, width, 2048))
    memory = norm(t, x, rows, width, "n")
    y = t.run("embed", [t.value("target", others, True)], [others * width])[0]
    for i in range(layers):
        h = norm(t, y, others, width, "n")
        y = t.add(y, attention(t, h, h, others, others, width, heads, tables))
        y = t.add(y, attention(t, norm(t, y, others, width, "n"), memory, others, rows, width, heads, tables))
        y = t.add(y, gated(t, norm(t, y, others, width, "n"), others, width, 2048))
    t.backward(t.linear(norm(t, y, others, width, "n"), "wl", others, width, 16384))
    return t


def convolution(t, x, side, channels, out, kernel=3):
    """Convolution, batch norm and ReLU of a batch of 8 images."""
    numbers = 8 * side * side * out
    x = t.product("conv", x, t.weight("wc", channels * out * kernel * kernel), numbers, 2 * numbers * channels * kernel * kernel)
    return t.op("relu", [t.op("norm", [x, t.weight("wb", out)], numbers, "x")], numbers, "y")


def resnet(stages=((56, 64, 14), (28, 128, 32), (14, 256, 80), (7, 512, 14))):
    t = Tape("resnet deep")
    x, channels = convolution(t, t.value("image", 8 * 3 * 56 * 56, True), 56, 3, 64), 64
    for side, width, blocks in stages:
        for i in range(blocks):
            y = convolution(t, convolution(t, x, side, channels, width, 1), side, width, width)
            y = t.op("norm", [t.product("conv", y, t.weight("wc", width * width * 4), 8 * side * side * 4 * width,
                                        64 * side * side * width * width)], 8 * side * side * 4 * width, "x")
            if channels != 4 * width:
                x = t.product("conv", x, t.weight("wc", 4 * channels * width), t.size(y), 2 * t.size(y) * channels)
            x, channels = t.op("relu", [t.add(x, y)], t.size(y), "y"), 4 * width
    t.backward(t.linear(t.op("pool", [x], 8 * channels, ""), "wl", 8, channels, 1000))
    return t


def unet(depth=5, per_level=36, side=256, width=32):
    t = Tape(f"unet depth={depth}")
    x, channels, skips = t.value("image", 8 * 3 * side * side, True), 3, []
    for level in range(depth):
        n, c = side >> level, width << level
        for i in range(per_level):
            x, channels = convolution(t, x, n, channels, c), c
        skips.append(x)
        x = t.op("pool", [x], t.size(x) // 4, "x")
    for i in range(per_level):
        x, channels = convolution(t, x, side >> depth, channels, width << depth), width << depth
    for level in reversed(range(depth)):
        n, c = side >> level, width << level
        x = t.op("upsample", [x], 4 * t.size(x), "")
        x, channels = t.op("cat", [x, skips[level]], t.size(x) + t.size(skips[level]), ""), channels + c
        for i in range(per_level):
            x, channels = convolution(t, x, n, channels, c), c
    t.backward(t.product("conv", x, t.weight("wl", channels * 4), 8 * side * side * 4, 64 * side * side * channels))
    return t


def random_dag(operations=1050, seed=1):
    """A graph of random operations. An operation mostly reads recent values, and rarely any earlier value."""
    t, g = Tape(f"random_dag {seed}"), random.Random(seed)
    recent = [t.run("embed", [t.value("input", 1 << 20, True)], [1 << 20])[0]]
    for i in range(operations):
        pick = lambda: recent[-1 - min(int(g.expovariate(0.5)), len(recent) - 1)] if g.random() < 0.97 else g.choice(recent)
        a, kind = pick(), g.random()
        n = t.size(a)
        if kind < 0.35:
            out = max(1 << 12, min(1 << 23, int(n * g.choice((0.25, 0.5, 1, 1, 1, 2, 4)))))
            y = t.product("mm", a, t.weight("w", 1 << g.randint(10, 18)), out, int(2 * out * g.choice((256, 512, 1024, 4096))))
        elif kind < 0.75:
            y = t.op("map", [a], n, g.choice(("x", "y", "")))
        else:
            b = pick()
            y = t.product("mul", a, b, max(n, t.size(b)), 0) if b != a else t.op("map", [a], n, "x")
        recent.append(y)
    end = recent[-1]
    for v in [v for v in recent[:-1] if not any(v in o["inputs"] for o in t.operations)]:
        end = t.product("mul", end, v, t.size(end), 0)
    t.backward(end)
    return t


def main(directory, *kinds):
    makers = {f.__name__: f for f in (llama, unet, resnet, encoder_decoder, random_dag)}
    for kind in kinds or makers:
        t = makers[kind]()
        path = pathlib.Path(directory) / f"{kind}.json"
        path.write_text(json.dumps(t.document()))
        print(path, len(t.operations), "operations")


if __name__ == "__main__":
    main(*sys.argv[1:])
