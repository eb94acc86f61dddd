#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the problem of a U-Net with the blocks of instances/unet-depth-4.json, but another depth. Costs are fitted to the instance.

An operation takes c0 + max(c1 * bytes, c2 * multiplications). The three constants come from two activations and a convolution of
the instance. Each convolution has one value for all its parameters. With depth 4, the script prints the difference to the instance.

    python3 bench/deeper_unet.py DEPTH FILE [BATCH]      # BATCH times the instance's images, 1 by default
"""
import json
import pathlib
import sys

instance = json.loads((pathlib.Path(__file__).parent / "instances" / "unet-depth-4.json").read_text())
MIB = 1 << 20
big, small, conv = (instance["operations"][i]["seconds"] for i in (3, 39, 13))
c1 = (big - small) / (15 * MIB)
c0 = big - 16 * MIB * c1
c2 = conv - c0  # seconds of a 3 x 3 convolution that keeps the number of channels, on any level


def unet(depth, batch=1):
    values, operations, targets = [], [], []

    def value(bytes, held=False):
        values.append({"name": f"v{len(values)}", "bytes": int(bytes), "held": held})
        return len(values) - 1

    def op(kind, inputs, outputs, work=0.0, wanted=()):
        """Appends an operation and returns its outputs, those of `wanted` last.

        work: multiplications, relative to a 3 x 3 convolution that keeps the channels. wanted: bytes of the outputs that are targets.
        """
        made = [value(b) for b in [*outputs, *wanted]]
        targets.extend(made[len(outputs):])
        moved = sum(values[v]["bytes"] for v in {*inputs, *made} if not values[v]["held"])
        operations.append({"name": f"{kind}_{len(operations)}", "kind": kind, "inputs": inputs, "outputs": made,
                           "seconds": c0 + max(c1 * moved, c2 * work * batch)})
        return made

    def activation(level):
        return batch * 8 * MIB >> level

    def channels(level):
        return 32 << level

    def layer(level, x, into, first=False):
        """Convolution, batch norm, ReLU. `into`: number of input channels."""
        c, a = channels(level), activation(level)
        weight, work = 36 * into * c, 0 if first else into / c
        w = value(weight, held=True)
        y = op("convolution", [x, w], [a], work)[0]
        op("add", [], [], wanted=[8])
        n, mean, deviation, *_ = op("batch_norm", [y], [a, 4 * c, 4 * c], wanted=[4 * c, 4 * c])
        stats = [mean, deviation, len(values) - 2, len(values) - 1]
        r = op("relu", [n], [a])[0]

        def back(g):
            g = op("threshold_backward", [g, r], [a])[0]
            g = op("batch_norm_backward", [g, y, *stats], [a], wanted=[4 * c, 4 * c])[0]
            if first:
                op("convolution_backward", [g], [], wanted=[weight, 4 * c])
                return None
            return op("convolution_backward", [g, x, w], [values[x]["bytes"]], 2 * work, [weight, 4 * c])[0]
        return r, back

    def block(level, x, into, first=False):
        y, lower = layer(level, x, into, first)
        y, upper = layer(level, y, channels(level))
        return y, lambda g: lower(upper(g))

    def level_of(level, x, into):
        """A level and all levels below it. Returns its output, and a function from the gradient of the output to the gradient of `x`."""
        y, back = block(level, x, into, level == 0)
        if level == depth:
            return y, back
        a, c = activation(level), channels(level)
        pooled, where = op("max_pool", [y], [a // 4, a // 2])
        below, back_below = level_of(level + 1, pooled, c)
        w = value(16 * 2 * c * c, held=True)
        up = op("transposed_convolution", [below, w], [a], 2 / 9)[0]
        both = op("cat", [up, y], [2 * a])[0]
        z, back_up = block(level, both, 2 * c)

        def whole(g):
            g_both = back_up(g)
            g = op("convolution_backward", [g_both, below, w], [activation(level + 1)], 4 / 9, [16 * 2 * c * c, 4 * c])[0]
            g = back_below(g)
            g = op("max_pool_backward", [g, y, where], [a])[0]
            return back(op("add", [g_both, g], [a])[0])
        return z, whole

    image = value(batch * MIB // 2, held=True)
    y, back = level_of(0, image, 3)
    out = activation(0) // 32
    w = value(4 * 32, held=True)
    z = op("convolution", [y, w], [out])[0]
    square = op("pow", [z], [out])[0]
    loss = op("mean", [square], [], wanted=[4])[0]
    one = op("ones_like", [loss], [4])[0]
    spread = op("div", [one], [out])[0]
    power = op("pow", [z], [out])[0]
    twice = op("mul", [power], [out])[0]
    g = op("mul", [spread, twice], [out])[0]
    back(op("convolution_backward", [g, y, w], [activation(0)], 0, [4 * 32, 4])[0])
    return {"format": "remat-problem", "version": 1, "name": f"unet depth {depth}, batch {batch}", "values": values, "operations": operations,
            "targets": sorted(targets)}


if __name__ == "__main__":
    depth, file, batch = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1
    made = unet(depth, batch)
    if (depth, batch) == (4, 1):
        off = [abs(a["seconds"] / b["seconds"] - 1) for a, b in zip(made["operations"], instance["operations"])]
        print(f"{len(made['operations'])} operations of {len(instance['operations'])}; seconds differ by {100 * max(off):.1f} % at most, "
              f"{100 * abs(sum(o['seconds'] for o in made['operations']) / sum(o['seconds'] for o in instance['operations']) - 1):.2f} % in all")
    pathlib.Path(file).write_text(json.dumps(made))
