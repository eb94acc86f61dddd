# SPDX-License-Identifier: Apache-2.0
"""Forwards and backwards under autocast."""

import logging
import unittest

import emulated
import torch

import following
from following import Net, Test

DEVICE = emulated.device.type
torch.set_num_threads(1)  # the workspace of a kernel depends on the number of threads


def in_blocks(model, x, k):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        first = model(x)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        (first * model(2 * x)).mean().backward()


def in_turns(model, x, k):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        model(x).square().mean().backward()
        model(2 * x).square().mean().backward()


def without_casts(model, x, k):
    with torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=False):
        (model(x) * model(2 * x)).mean().backward()


def together(model, x, k):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        first, second = model(x), model(2 * x)
    (first * second).mean().backward()


class Autocast(Test):
    def test_two_forwards(self):
        """Two forwards in one autocast block: plain PyTorch adds their gradients in half precision, which a warning names."""
        for step in in_blocks, in_turns, without_casts:
            with self.subTest(step.__name__), self.assertNoLogs("remat", logging.WARNING):
                self.check(Net, step)
        with self.assertLogs("remat", logging.WARNING) as told:
            following.trained(Net, together, 3, {})
        self.assertIn("two forwards in one autocast block", told.output[0])

    def test_autocast_of_the_backward(self):
        """The backward runs inside an autocast block, as in loops with the whole step in one block. Then products of the part of the forward
        without autocast have a backward in half precision."""
        class Part(Net):
            def act(self, h):
                with torch.autocast(emulated.device.type, enabled=False):
                    return torch.nn.functional.linear(h.float(), self.first.weight @ self.first.weight.T).tanh()

        def inside(model, x, k):
            with torch.autocast(emulated.device.type, dtype=torch.bfloat16, enabled=k != 4):
                loss = model(x).square().mean()
                loss.backward()
            return [loss]

        def outside(model, x, k):
            with torch.autocast(emulated.device.type, dtype=torch.bfloat16):
                loss = model(x).square().mean()
            with torch.autocast(emulated.device.type, dtype=torch.bfloat16, enabled=k % 3 > 0):
                loss.backward()
            return [loss]

        for step in (inside, outside):
            with self.assertNoLogs("remat", logging.WARNING):
                self.check(Part, step)

    def test_batch_norm_without_weights(self):
        """Without weights, the running statistics decide the type of the tensors that the backward reads."""
        class Plain(Net):
            def begin(self):
                self.norm = torch.nn.BatchNorm1d(48, affine=False)

        with self.assertNoLogs("remat", logging.WARNING):
            self.check(Plain, in_blocks)
        self.check(Plain, in_blocks, budget="85% of activations")


if __name__ == "__main__":
    unittest.main()
