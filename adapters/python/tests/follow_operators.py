# SPDX-License-Identifier: Apache-2.0
"""Operators and methods whose behaviour on tensors without data differs from that on data."""

import logging
import unittest

import torch
from torch import nn

import remat
from following import Net, Test, backward

torch.set_num_threads(1)  # the workspace of a kernel depends on the number of threads

#: Draws whose count of numbers depends on values. For zeros these kernels draw nothing.
DRAWS = {
    "poisson": lambda h: torch.poisson(h.detach().tanh().exp()) * h,
    "gamma": lambda h: torch._standard_gamma(h.tanh().exp()) * h,
    "binomial": lambda h: torch.binomial(torch.full_like(h, 10), h.detach().sigmoid()) * h,
}


#: Masks that kernels make: (model, input) -> mask. The mask of one size selects the same number of rows in each step.
MASKS = {
    "drawn": lambda m, x: torch.rand(32) < 0.8, "drawn, one size": lambda m, x: torch.rand(32).argsort() < 20,
    "of a layer": lambda m, x: m.first(x).detach()[:, 0] > -0.5, "of a layer, one size": lambda m, x: m.first(x).detach()[:, 0].argsort() < 20,
}


def selects_twice(mask):
    """A model that selects rows of its input by `mask`, and among these by their own values."""
    class Model(Net):
        def forward(self, x):
            x = x[mask(self, x)]
            return super().forward(x[x[:, 0] > -1])

    return Model


class Positions(Net):
    """Returns positions in a mask that depends on constants only."""

    def __init__(self, returns_mask):
        super().__init__()
        self.returns_mask = returns_mask

    def forward(self, x):
        mask = torch.zeros(4, 6)
        mask[:, 3:] = 1
        mask = (1 - mask) * (torch.arange(6) % 2)
        rows, columns = mask.nonzero().unbind(1)
        h = super().forward(x)
        return h + h[rows].sum(0), columns, *([mask] if self.returns_mask else [])


def filled(like):
    """`like` reads only the sizes of an empty tensor, which is filled afterwards."""
    def act(h):
        t = torch.empty(48)
        u = like(t)
        t.copy_(h.detach()[0])
        return h * t * u

    return act


LIKES = {"ones_like": torch.ones_like, "rand_like": torch.rand_like, "new_zeros": lambda t: t.new_zeros(48) + 2, "full_like": lambda t: torch.full_like(t, 3)}

#: Methods that need the memory of a tensor, or say where it is
MEMORY = {
    "is_shared": lambda h: h * (1 + h.is_shared()),
    "storage": lambda h: h * (1 + h.untyped_storage().is_shared()),
}


def acts(how):
    class Acts(Net):
        def act(self, h):
            return how(h)

    return Acts


class OneCounter(Net):
    """A buffer and a view of it, which share one count of writes. Every third step leaves the recorded path."""

    def begin(self):
        self.steps = 0
        self.register_buffer("scale", torch.ones(48))
        self.register_buffer("part", self.scale[:24])

    def act(self, h):
        self.steps += 1
        with torch.no_grad():
            self.scale.mul_(0.9)
        return h * self.scale if self.steps % 3 else h.tanh() * self.scale * self.part.sum()


class WritesBetweenMasks(Net):
    """Writes a tensor in place between two masks. A step whose first mask has another size is recorded from there on."""

    def forward(self, x, ids):
        rows = ids.clone()
        few = rows[rows > 9]
        rows.mul_(3)
        drawn = torch.randint(0, 60, (40,))  # unknown before it runs, so the calls run ahead for the second mask
        return super().forward(x) * few.sum(), drawn[(rows[:, None] == drawn).any(0)]


class NestedProduct(Net):
    """Operators on nested tensors have kernels of their own."""

    def act(self, h):
        parts = torch.nested.as_nested_tensor([h[:12].tanh(), h[12:]])
        return h + sum(product.mean() for product in (parts @ parts.transpose(1, 2)).unbind())


def by_rows(h):
    return torch.vmap(lambda row: (row * row.sum()).sin())(h)


def by_gradients(h):
    return h + torch.func.grad(lambda t: t.sin().square().sum())(h)


def by_directions(h):
    return h + torch.func.jvp(torch.sin, (h,), (h.cos(),))[1]


def by_jacobians(h):
    return h + torch.vmap(torch.func.jacrev(lambda row: row.sin().square().sum()))(h)


def by_other_draws(h):
    return torch.vmap(lambda row: nn.functional.dropout(row, 0.3), randomness="different")(h)


class GradientPerSample(Net):
    def act(self, h):
        def loss(weights, row):
            return torch.func.functional_call(self.last, weights, (row,)).square().sum()

        found = torch.vmap(torch.func.grad(loss), (None, 0))(dict(self.last.named_parameters()), h)
        return h + found["weight"].sum(1).tanh()


class Operators(Test):
    def test_transforms_inside(self):
        for transformed in (by_rows, by_gradients, by_directions, by_jacobians, by_other_draws):
            class Transforms(Net):
                def act(self, h):
                    return transformed(h)

            with self.subTest(transformed.__name__), self.assertNoLogs("remat", logging.WARNING):
                self.check(Transforms)
        with self.assertNoLogs("remat", logging.WARNING):
            self.check(GradientPerSample)

    def test_nested_tensors(self):
        self.check(NestedProduct, plans=False)

    def test_a_write_between_masks(self):
        def step(model, x, k):
            y, found = model(x, torch.randint(0, 20, (16,)))
            y.square().mean().backward()
            return [found]

        self.check(WritesBetweenMasks, step)

    def test_draws(self):
        for name, how in DRAWS.items():
            with self.subTest(name), self.assertNoLogs("remat", logging.WARNING):
                self.check(acts(how))
                self.check(lambda how=how: nn.Sequential(*(acts(how)() for _ in range(3))), budget="60% of activations")

    def test_a_mask_behind_a_mask(self):
        for name, mask in MASKS.items():
            with self.subTest(name):
                self.check(selects_twice(mask), steps=8)

    def test_convolutions_of_other_sizes(self):
        """PyTorch chooses a kernel by size. The kernels allocate in different ways."""
        model = nn.Sequential(nn.ConvTranspose2d(24, 24, 2, 2), nn.ReLU(), nn.Conv2d(24, 4, 1))
        remat.wrap(model, budget="100% of activations", planner=remat.Planner(time_limit=1), cache=False)
        with self.assertNoLogs("remat", logging.WARNING):
            for n in 10, 22:
                model.zero_grad()
                model(torch.randn(n, 24, 14, 14)).square().mean().backward()
                self.assertEqual(remat.of(model).memory()["unplanned"], 0, f"{n} images")

    def test_memory_of_which_only_the_size_is_read(self):
        for name, like in LIKES.items():
            with self.subTest(name):
                self.check(acts(filled(like)), steps=6)

    def test_methods_of_memory(self):
        for name, how in MEMORY.items():
            with self.subTest(name):
                self.check(acts(how), plans=False)

    def test_numbers_of_eight_bits(self):
        self.check(acts(lambda h: h + h.detach().to(torch.float8_e4m3fn).float()))

    def test_positions_that_are_returned(self):
        def step(model, x, k):
            h, *others = model(x)
            h.square().mean().backward()
            return others

        for returns_mask in (False, True):
            with self.subTest(returns_mask=returns_mask), self.assertNoLogs("remat", logging.WARNING):
                self.check(lambda: Positions(returns_mask), step)

    def test_seed(self):
        self.check(acts(lambda h: h * (1 + torch.initial_seed() % 5)))

    def test_tensors_with_one_count_of_writes(self):
        self.check(OneCounter, backward, steps=8)


if __name__ == "__main__":
    unittest.main()
