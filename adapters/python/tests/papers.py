# SPDX-License-Identifier: Apache-2.0
"""The models of bench/papers in size `tiny`: loss and gradients of a wrapped step equal eager mode bit by bit."""
import pathlib
import sys
import unittest

import compare
import torch

import remat

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "bench/papers"))
import models  # noqa: E402


def step(model, args):
    """Loss and gradients of a step. Each call starts with the same state of the generator."""
    torch.manual_seed(1)
    for p in model.parameters():
        p.grad = None
    loss = model(*args)
    loss.backward()
    return compare.copied([loss, {n: p.grad for n, p in model.named_parameters()}])


class Papers(unittest.TestCase):
    def test_steps_equal_eager(self):
        for name in models.WORKS:
            with self.subTest(model=name):
                model, args = models.build(name, "tiny")
                expected = step(model, args)
                model, args = models.build(name, "tiny")
                self.wrap(model, args)
                self.assertGreater(remat.of(model).plan["operations"], 0)
                self.assertTrue(compare.same(step(model, args), expected), f"{name}: a wrapped step differs")

    def wrap(self, model, args):
        """Wraps with a budget of 60 %, or with the smallest budget if 60 % is too small."""
        options = {"on_refuse": "raise", "planner": remat.Planner(time_limit=0.3)}
        try:
            remat.wrap(model, args, budget="60%", **options)
        except remat.OverBudget as e:
            remat.wrap(model, args, budget=e.needed, **options)

    def test_unknown_names(self):
        for name, size, culprit in (("GPT-9", "tiny", "'GPT-9'"), ("GPT-2", "huge", "'huge'")):
            with self.assertRaisesRegex(ValueError, culprit):
                models.build(name, size)


if __name__ == "__main__":
    unittest.main()
