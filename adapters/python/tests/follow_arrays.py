# SPDX-License-Identifier: Apache-2.0
"""Arrays that share memory with tensors, and that change without an operator."""

import logging
import unittest

import numpy
import torch
from following import Net, Test

import remat


class WithArray(Net):
    def begin(self):
        self.array = numpy.ones(48, dtype=numpy.float32)

    def change(self):
        self.array *= 1.5

    def here(self):
        return torch.from_numpy(self.array)


class Before(WithArray):
    def act(self, h):
        self.change()
        return (h * self.here()).tanh()


class BetweenTensors(WithArray):
    def act(self, h):
        h = h + self.here()
        self.change()
        return h.tanh() + self.here()


class BetweenCalls(WithArray):
    def act(self, h):
        t = self.here()
        h = h + t
        self.change()
        return h.tanh() + t


class BetweenParts(WithArray):
    """The two tensors share a part of their memory."""

    def act(self, h):
        h = h[:, :40] * torch.from_numpy(self.array[:40])
        self.change()
        return torch.cat([h, h[:, :8]], 1) * torch.from_numpy(self.array[-8:]).repeat(6)


class Sorts(Net):
    """Reads an array of an activation. Some constants are made before that, others after. Then a size depends on values."""

    def before(self, h):
        return torch.zeros(48)

    def use(self, array):
        return numpy.argsort(array[:, 0])

    def act(self, h):
        factors = self.before(h)
        factors[2:40] = 1
        order = self.use(h.detach().tanh().numpy())
        summands = torch.ones(48)
        summands[5] = 2
        h = (h * factors + summands)[torch.from_numpy(order)]
        return (h + h[h.detach()[:, 5] > 2].tanh().sum(0)).tanh()


class SortsAndWrites(Sorts):
    def use(self, array):
        array[:, 1] = 0
        return super().use(array)


class SortsByValues(Sorts):
    """A number of the step is written into the constant, before the array is read."""

    def before(self, h):
        factors = super().before(h)
        factors[0] = h.detach().mean()
        return factors


class NowAndThen(WithArray):
    """The array changes only in some steps, and an operator changes the shape of the tensor in place."""
    steps = 0

    def act(self, h):
        h = h + self.here().unsqueeze_(0)
        self.steps += 1
        if self.steps % 3 == 0:
            self.change()
        return h.tanh()


class After(WithArray):
    def act(self, h):
        h = h + self.here()
        self.change()
        return h.tanh()


class AfterProduct(WithArray):
    """The backward reads the array, too, as it is then."""

    def act(self, h):
        h = h * self.here()
        self.change()
        return h.tanh()


class Copied(WithArray):
    def here(self):
        return torch.tensor(self.array)

    act = After.act


class Bytes(WithArray):
    def begin(self):
        self.array = bytearray(48 * 4)

    def change(self):
        self.array[0] += 1

    def here(self):
        return torch.frombuffer(self.array, dtype=torch.float32)

    act = After.act


class Buffer(WithArray):
    """The array is a view of a tensor that the module holds."""

    def begin(self):
        self.register_buffer("mean", torch.ones(48))
        self.array = self.mean.numpy()

    def here(self):
        return self.mean

    act = After.act


class Unchanged(WithArray):
    """PyTorch itself writes a tensor that shares memory with an array."""

    def begin(self):
        self.register_buffer("mean", torch.ones(48))
        self.array = self.mean.numpy()

    def act(self, h):
        h = h + self.mean
        self.mean.mul_(0.9).add_(h.detach().mean(0))
        return h.tanh() + self.mean


class Arrays(Test):
    def test_planned(self):
        for make in (Before, Unchanged):
            with self.subTest(make.__name__), self.assertNoLogs("remat", logging.WARNING):
                self.check(make)

    def test_written_in_some_steps(self):
        with self.assertLogs("remat", logging.WARNING) as told:
            self.check(NowAndThen, steps=8)
        self.assertIn("without an operator", told.output[0])

    def test_a_kernel_that_fails(self):
        """The array has its last numbers, whatever happens."""
        class Fails(WithArray):
            def act(self, h):
                h = self.last.weight[(h + self.here()).argmax(1) + 16]  # of 16 rows
                self.change()
                return h

        model = remat.wrap(Fails(), planner=remat.Planner(time_limit=1), cache=False)
        with self.assertRaises(IndexError):
            model(torch.ones(4, 16))
        self.assertEqual(model.array[0], numpy.float32(1.5))

    def test_another_path_after_a_read(self):
        """A step that reads an array and then takes another path is planned, too, unless constants changed meanwhile."""
        with self.assertNoLogs("remat", logging.WARNING):
            model = self.check(Sorts, steps=8, budget="150% of activations")
        self.assertGreater(len(remat.of(model).plans), 1)
        for make in (SortsAndWrites, SortsByValues):
            with self.subTest(make.__name__):
                self.check(make, steps=8, plans=None)

    def test_written_after_a_read(self):
        for make in (BetweenTensors, BetweenCalls, BetweenParts, After, AfterProduct, Copied, Bytes, Buffer):
            with self.subTest(make.__name__), self.assertLogs("remat", logging.WARNING) as told:
                self.check(make, plans=False)
            self.assertIn("written", told.output[0])
            self.assertIn("without an operator", told.output[0])


if __name__ == "__main__":
    unittest.main()
