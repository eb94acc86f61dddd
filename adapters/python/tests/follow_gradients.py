# SPDX-License-Identifier: Apache-2.0
"""Gradients that other code holds, reads or replaces: views, arrays, other threads, backwards that overwrite what the forward has kept."""

import threading
import unittest

import torch
from torch import nn

import remat
from following import Net, Test, backward, run_together, same


class Layers(nn.Sequential):
    def __init__(self, width=16):
        super().__init__(*(m for _ in range(6) for m in (nn.Linear(width, width), nn.Tanh())))


def held_while_they_accumulate(hold):
    """A step of two micro-batches. `hold` maps the gradients after the first; the results are read before and after the second."""
    def step(model, x, k):
        backward(model, x, k)
        held = [hold(p.grad) for p in model.parameters()]
        seen = []

        def look():
            seen.extend(torch.as_tensor(h).clone() for h in held)

        look()
        loss = model(2 * x).square().mean()
        look()
        loss.backward()
        look()
        for h in held:
            h *= 0.5
        return seen
    return step


class Gradients(Test):
    def test_views(self):
        """Views of gradients. A later step must not overwrite their memory."""
        self.check(Layers, held_while_they_accumulate(lambda g: g.view(-1)), steps=8)

    def test_detached(self):
        self.check(Layers, held_while_they_accumulate(torch.Tensor.detach), steps=8)

    def test_arrays(self):
        self.check(Layers, held_while_they_accumulate(torch.Tensor.numpy), steps=8)

    def test_several_threads_replace_them(self):
        """Forwards run while another thread replaces gradients under a lock of the user."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))
        x = torch.randn(3, 4, 16)
        lock = threading.Lock()

        def gradients(k):
            loss = model(x[k]).square().mean()
            with lock:
                model.zero_grad()
                loss.backward()
                return [p.grad.clone() for p in model.parameters()]

        expected = [gradients(k) for k in range(3)]
        remat.wrap(model, budget="300% of activations", time_limit=1, cache=False)
        gradients(0)
        found = [[] for _ in range(3)]

        def train(k):
            for _ in range(100):
                found[k].append(gradients(k))

        run_together([threading.Thread(target=train, args=(k,)) for k in range(3)])
        for k in range(3):
            self.assertEqual(len(found[k]), 100)
            self.assertTrue(all(same(f, expected[k]) for f in found[k]))

    def test_threads_one_after_another(self):
        """A budget that suffices for one thread also suffices for the next thread."""
        torch.manual_seed(0)
        model, x = Layers(64), torch.randn(128, 64)
        with self.assertRaises(remat.OverBudget) as seen:
            remat.wrap(model, (x,), budget=1, time_limit=1, cache=False)
        remat.unwrap(model)
        remat.wrap(model, (x,), budget=seen.exception.needed * 21 // 20, time_limit=1, cache=False)
        found = []

        def train():
            for _ in range(3):
                model.zero_grad()
                model(x).square().mean().backward()
                found.append(model[0].weight.grad.clone())

        train()
        for _ in range(3):
            run_together([threading.Thread(target=train)])
        self.assertEqual(len(found), 12)
        self.assertTrue(all(torch.equal(f, found[0]) for f in found))

    def test_several_threads_add_to_them(self):
        """Gradients are integers, so their sum does not depend on the order of the threads."""
        class Sums(nn.Module):
            def __init__(self):
                super().__init__()
                self.weights = nn.ParameterList(nn.Parameter(torch.zeros(64, 64)) for _ in range(6))

            def forward(self, x):
                for w in self.weights:
                    x = x + (x @ w).relu()
                return x.sum()

        def run(wrapped):
            model = Sums()
            if wrapped:
                remat.wrap(model, budget="200% of activations", time_limit=1, cache=False)
            x = torch.arange(3 * 8 * 64).reshape(3, 8, 64).remainder(3).float()
            model(x[0]).backward()
            model(x[0]).backward()

            def train(k):
                for _ in range(50):
                    model(x[k]).backward()

            run_together([threading.Thread(target=train, args=(k,)) for k in range(3)])
            return [p.grad for p in model.parameters()]

        self.assertTrue(same(run(True), run(False)))

    def test_custom_backwards_that_use_up_the_forward(self):
        """A custom backward that overwrites what its forward has kept, or frees a graph that it has made, can run only once."""
        class Saves(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x.cos())
                return x.sin()

            @staticmethod
            def backward(ctx, g):
                return ctx.saved_tensors[0].mul_(g)

        class Keeps(Saves):
            @staticmethod
            def forward(ctx, x):
                ctx.kept = x.cos()
                return x.sin()

            @staticmethod
            def backward(ctx, g):
                return torch.mul(ctx.kept, g, out=ctx.kept)

        class Frees(Saves):
            @staticmethod
            def forward(ctx, x):
                with torch.enable_grad():
                    ctx.x = x.detach().requires_grad_()
                    ctx.y = ctx.x.sin()
                return ctx.y.detach()

            @staticmethod
            def backward(ctx, g):
                y = ctx.y
                return torch.autograd.grad((y,), ctx.x, g)[0]

        def twice(model, x, k):
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()

        for kind, step in ((Saves, backward), (Keeps, backward), (Keeps, twice), (Frees, backward)):
            with self.subTest(kind=kind.__name__, step=step.__name__):
                self.check(type("Custom", (Net,), {"act": lambda self, h: kind.apply(kind.apply(h))}), step, plans=False)


if __name__ == "__main__":
    unittest.main()
