# SPDX-License-Identifier: Apache-2.0
"""Followed steps whose forward runs compiled functions, operators with function arguments, or other threads."""

import concurrent.futures
import logging
import threading
import unittest

import torch
from torch._higher_order_ops import while_loop

import remat
from following import Net, Test


@torch.compile(backend="aot_eager")
def compiled(h):
    return (h.sin() * 2).tanh()


class Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x ** 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3 * ctx.saved_tensors[0] ** 2


def with_act(f, steps=None):
    """A class of models that apply `f` in all steps, or only in `steps`."""
    class Acts(Net):
        def begin(self):
            self.steps = 0

        def act(self, h):
            self.steps += 1
            return f(h.tanh()) if steps is None or self.steps in steps else h.tanh()

    return Acts


class Code(Test):
    def test_that_runs_as_it_is(self):
        for f in (lambda h: torch.cond(h.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (h,)),
                  lambda h: h * while_loop(lambda k, y: k < 3, lambda k, y: (k + 1, y.sin()), (torch.tensor(0), h.detach()))[1],
                  lambda h: compiled(h)):
            for steps in (None, (4, 6)):
                with self.subTest(f, steps=steps), self.assertLogs("remat", logging.WARNING) as seen:
                    model = self.check(with_act(f, steps), steps=7, plans=steps is not None)
                    self.assertEqual(len(remat.of(model).plans), 0 if steps is None else 1)
                self.assertEqual(len(seen.output), 1)
                self.assertIn(f"torch.compile has compiled, or is to compile, runs at {__file__}", seen.output[0])
            with self.subTest(f, strict=True), self.assertRaisesRegex(remat.Refused, "torch.compile has compiled"):
                self.check(with_act(f), on_refuse="raise")
            with self.subTest(f, follow=False), self.assertLogs("remat", logging.WARNING) as seen:
                self.check(with_act(f), follow=False, plans=False)
            self.assertIn("this call is not planned", seen.output[0])

    def test_on_other_threads(self):
        pool = concurrent.futures.ThreadPoolExecutor(1)
        self.addCleanup(pool.shutdown)
        pool.submit(int).result()  # starts the thread of the pool

        def started(h):
            found = []
            thread = threading.Thread(target=lambda: found.append(h.sin()))
            thread.start()
            thread.join()
            return found[0]

        for f in (started, lambda h: pool.submit(torch.sin, h).result()):
            for steps in (None, (4, 6)):
                with self.subTest(f, steps=steps), self.assertLogs("remat", logging.WARNING) as seen:
                    model = self.check(with_act(f, steps), steps=7, plans=steps is not None)
                    self.assertEqual(len(remat.of(model).plans), 0 if steps is None else 1)
                self.assertEqual(len(seen.output), 1)
                self.assertIn(f"another thread at {__file__}", seen.output[0])

    def test_that_is_planned(self):
        """Custom functions inside function transforms are planned."""
        for f in (torch.vmap(Cube.apply), torch.func.grad(lambda h: Cube.apply(h).sum())):
            with self.subTest(f), self.assertNoLogs("remat", logging.WARNING):
                self.assertGreater(len(remat.of(self.check(with_act(f))).plans), 0)


if __name__ == "__main__":
    unittest.main()
