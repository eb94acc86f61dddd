# SPDX-License-Identifier: Apache-2.0
"""Forwards that read values: writes between two reads, operators whose output sizes depend on values, memory that the module manages."""

import logging
import unittest

import numpy
import torch
from torch import nn

import remat
from following import Net, Test, backward

#: per case: (tensor made before a first read, write to the tensor after the first read, second read, of the tensor)
WRITES = {
    "a constant": (lambda x, h: torch.zeros(16), lambda c, v: c.add_(x_sum(c)), lambda c: c.max()),
    "like an input": (lambda x, h: torch.zeros_like(x[0]), lambda c, v: c.fill_(5.0), lambda c: c.max()),
    "twice": (lambda x, h: torch.zeros_like(x), lambda c, v: c.add_(5.0).mul_(2.0), lambda c: (c * 2).max()),
    "the value itself": (lambda x, h: torch.zeros_like(x[0]), lambda c, v: c.__setitem__(0, v), lambda c: c.max()),
    "part by part": (lambda x, h: x.argsort(1)[0], lambda c, v: [c.__setitem__(i, i * int(10 * v)) for i in range(3)], lambda c: c.sum()),
    "a mask": (lambda x, h: torch.ones(16, dtype=torch.bool), lambda c, v: c.__setitem__(slice(1, 9), False), lambda c: c.nonzero()[-1, 0] + c.sum()),
    "of an activation": (lambda x, h: h.detach() * 0, lambda c, v: c.add_(5.0), lambda c: c.max()),
}


def x_sum(c):
    return torch.arange(len(c), device=c.device).sum()


def writes(before, write, read):
    class Writes(Net):
        def forward(self, x):
            h = self.first(x)
            made = before(x, h)
            write(made, h.sum().item())
            value = float(read(made))
            return super().forward(x) * (value / (1 + abs(value)))

    return Writes


#: how a module writes a number into a new tensor
PLACES = {
    "a constant": lambda m, x: m.__setitem__((0, 2), torch.tensor(3.0)),
    "of itself": lambda m, x: m.__setitem__((0, -1), m[0, 2] + 3),
    "of an input": lambda m, x: m.__setitem__((..., 0, 2), x.sum()),
    "with a gradient": lambda m, x: m.__setitem__((0, 2), x.mean() * 2),
    "of a size": lambda m, x: m.__setitem__((0, 2), torch.tensor(x.shape)[-1]),
    "in a row": lambda m, x: m.__setitem__((slice(None, 2), 2), x.sum()),
    "in an index": lambda m, x: m.__setitem__(torch.tensor([0, 1]), x.sum()),
    "of itself, everywhere": lambda m, x: m.__setitem__(..., m.detach()[0, 0]),
    "in a mask": lambda m, x: m.__setitem__(torch.eye(3, dtype=torch.bool), x.sum()),
}


def puts(put):
    class Puts(Net):
        def act(self, h):
            matrix = torch.zeros(3, 3) + h.mean()
            plain = torch.zeros(3, 3)
            put(matrix, h)
            put(plain, h.detach())
            return h * matrix.sum().tanh() + plain.sum().tanh()

    return Puts


class Closure(torch.autograd.Function):
    """Calls a closure in the forward, and again in the backward, as quadratures and implicit layers do."""

    @staticmethod
    def forward(ctx, f, *tensors):
        ctx.f = f
        ctx.save_for_backward(*tensors)
        return f()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            result = ctx.f()
        return None, *torch.autograd.grad(result, ctx.saved_tensors, gradient)


class Encloses(Net):
    def begin(self):
        self.scale = nn.Parameter(torch.ones(48))

    def act(self, h):
        c = h.sigmoid()
        return Closure.apply(lambda: (c * self.scale).tanh(), c, self.scale)


class Packed(Net):
    """Packs sequences. C++ code outside of operators writes the lengths, and no operator uses them."""

    def begin(self):
        self.rnn = nn.LSTM(48, 24, batch_first=True, bidirectional=True)

    def act(self, h):
        packed = nn.utils.rnn.pack_padded_sequence(h.view(4, 8, 48), torch.tensor([8, 7, 5, 2]), batch_first=True)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return padded.reshape(32, 48)


class Labels(Net):
    """Writes a number to the masked rows, in the column of the label, as detectors make their targets."""

    def forward(self, x):
        y = super().forward(x)
        labels = x.argmax(1)
        chosen = y.detach().sum(1) > 0
        targets = torch.zeros_like(y)
        targets[chosen, labels[chosen]] = 1.0
        return nn.functional.binary_cross_entropy_with_logits(y, targets, reduction="none")


@torch.library.custom_op("remat_tests::chosen", mutates_args=())
def chosen(x: torch.Tensor) -> torch.Tensor:
    return (x.sum(1) > 0).nonzero()[:, 0]


@chosen.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


class Chosen(Net):
    choose = staticmethod(chosen)

    def act(self, h):
        rows = self.choose(h.detach())
        return h.index_add(0, rows, h[rows].tanh()) / (1 + len(rows))


#: operators without a kernel for shapes: the size of "positive" depends on values, that of "small" changes at some step
SIZE = [32]
UNTOLD = torch.library.Library("remat_untold", "DEF")
for name, choose in {"positive": lambda x: (x.sum(1) > 0).nonzero()[:, 0], "small": lambda x: torch.arange(SIZE[0], device=x.device)}.items():
    UNTOLD.define(f"{name}(Tensor x) -> Tensor")
    UNTOLD.impl(name, choose, "CompositeExplicitAutograd")


class ChosenUntold(Chosen):
    choose = torch.ops.remat_untold.positive


UNTOLD.define("count(Tensor x) -> int")
UNTOLD.impl("count", lambda x: int((x > 0).sum()), "CompositeExplicitAutograd")
UNTOLD.define("noise(Tensor x) -> Tensor")
UNTOLD.impl("noise", lambda x: torch.rand_like(x) * x, "CompositeExplicitAutograd")


class CountUntold(Net):
    def act(self, h):
        return h * (1 + torch.ops.remat_untold.count(h.detach()) / 1000)


class NoiseUntold(Net):
    """Calls an operator that draws, between two draws of the module. Keeps all results."""

    def act(self, h):
        self.drawn = [torch.rand(3), torch.ops.remat_untold.noise(h.detach()), torch.rand(3)]
        return h * (1 + sum(t.sum() for t in self.drawn).tanh())


class SmallUntold(Net):
    def forward(self, x):
        rows = torch.ops.remat_untold.small(self.first(x).detach())
        return super().forward(x.index_add(0, rows, x[rows].tanh()))


class Frees(torch.autograd.Function):
    """Frees the memory of its input between forward and backward, as reversible layers do."""

    @staticmethod
    def forward(ctx, h):
        ctx.h = h
        result = h.detach() * 2
        ctx.bytes = h.untyped_storage().nbytes()
        h.untyped_storage().resize_(0)
        return result

    @staticmethod
    def backward(ctx, gradient):
        ctx.h.untyped_storage().resize_(ctx.bytes)
        return gradient * 2


class Reversible(Net):
    def act(self, h):
        return Frees.apply(h + 0).tanh()


#: numbers that a module takes from a new tensor through its storage
STORAGES = {
    "the first byte": lambda t: t.untyped_storage()[0],
    "the name of the file": lambda t: len(t.untyped_storage().filename or ""),
    "shared": lambda t: t.share_memory_().is_shared(),
    "bytes in another order": lambda t: t.untyped_storage().byteswap(t.dtype) or t.nan_to_num().clamp(-1, 1).mean(),
}


def looks_into(storage):
    class LooksInto(Net):
        def act(self, h):
            return h * (1 + storage(h.detach().clone()) / 1000)

    return LooksInto


class OfItsType(Net):
    """Converts weights to the type of the input in each step, as losses with weights do."""

    def forward(self, x):
        self.first.weight.data = self.first.weight.data.to(x.device, dtype=x.dtype)
        self.norm.running_mean.data = self.norm.running_mean.data
        return super().forward(x)


def limits(model, x, h):
    model.last.weight.data = model.last.weight.data.clamp(-0.1, 0.1)


def of_activations(model, x, h):
    with torch.no_grad():
        model.second.weight.data = h.mean(0)[:, None] * x.mean(0)


def momentum(model, x, h):
    """A momentum update of a second encoder, as in contrastive models."""
    with torch.no_grad():
        for p, q in zip(model.second.parameters(), model.first.parameters(), strict=True):
            p.data = p.data * 0.9 + q.data * (1 - 0.9)


def of_a_graph(model, x, h):
    model.norm.weight.data = model.norm.weight.data * 0.9


def with_a_view(model, x, h):
    before = model.last.weight.data
    model.last.weight.data = model.last.weight.data * 0.9
    model.last.weight.data.add_(before.norm() / 100)


def of_a_name(model, x, h):
    other = model.last.weight.data * 0.9
    model.last.weight.data = other
    other.mul_(0.5)


def of_another(model, x, h):
    model.second.bias.data = model.first.bias.data
    model.second.bias.data.mul_(0.99)


def of_an_array(model, x, h):
    model.lent.data = model.lent.data * 0.9


def of_an_input(model, x, h):
    x.data = x.data * 0.9


def of_an_activation(model, x, h):
    h.data = h.data * 0.9


def of_another_shape(model, x, h):
    model.scale.data = model.scale.data[:1] * 0.9 if model.scale.numel() > 1 else torch.ones(48)


#: functions that replace the memory of a tensor in the middle of a forward: {function: True if the step can be planned}
OTHERS = {
    limits: True,
    of_activations: True,
    momentum: True,
    of_a_graph: False,
    with_a_view: False,
    of_a_name: False,
    of_another: False,
    of_an_array: False,
    of_an_input: False,
    of_an_activation: False,
    of_another_shape: False,
}


def puts_others(put):
    class PutsOthers(Net):
        def begin(self):
            self.second = nn.Linear(16, 48).requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(48), requires_grad=False)
            self.array = numpy.ones(48, numpy.float32)
            self.register_buffer("lent", torch.from_numpy(self.array).to(torch.get_default_device()))
            self.register_buffer("array_now", torch.zeros(()))

        def forward(self, x):
            h = self.norm(self.first(x))
            put(self, x, h)
            self.array_now += float(self.array.sum())
            return self.last(self.drop((h + self.second(x) * self.scale).tanh()))

    return PutsOthers


class Memory(Test):
    def test_written_between_two_looks(self):
        for name, (before, write, read) in WRITES.items():
            with self.subTest(name):
                self.check(writes(before, write, read), budget="150% of activations", on_refuse="raise")

    def test_one_number_at_the_places_of_a_mask_and_others(self):
        with self.assertNoLogs("remat", logging.WARNING):
            self.check(Labels, budget="150% of activations", on_refuse="raise")

    def test_places_of_a_mask_in_a_transposed_tensor(self):
        """What is put there gives a contiguous tensor."""
        class Scattered(Net):
            def forward(self, x):
                return self.first(x).t().masked_scatter(x[:, 0] > 0, self.first(x[x[:, 0] > 0]).tanh()) * 2

        def step(model, x, k):
            y = model(x)
            y.square().mean().backward(retain_graph=True)
            y.sum().backward()
            return [y, torch.tensor(y.stride())]

        self.check(Scattered, step)

    def test_operator_of_others_with_sizes_by_values(self):
        self.check(Chosen, budget="150% of activations", on_refuse="raise")

    def test_operator_that_does_not_tell_of_its_sizes(self):
        self.check(ChosenUntold, budget="150% of activations", on_refuse="raise")
        self.check(CountUntold, budget="150% of activations")

        def step(model, x, k):
            backward(model, x, k)
            return model.drawn

        with self.assertLogs("remat", logging.WARNING) as told:
            self.check(NoiseUntold, step, plans=False, budget="150% of activations")
        self.assertIn("no tag `nondeterministic_seeded`", told.output[0])

        def small(model, x, k):
            SIZE[0] = 32 if k < 3 else 5
            try:
                backward(model, x, k)
            except remat.Error as error:
                self.assertIn("remat_untold::small gave a tensor of another size", str(error))
                errors.append(k)
                backward(model, x, k)

        errors: list[int] = []
        self.check(SmallUntold, small, budget="150% of activations")
        self.assertEqual(errors, [3])

    def test_one_number_put_into_a_tensor(self):
        for name, put in PLACES.items():
            with self.subTest(name):
                self.check(puts(put), on_refuse="raise")

    def test_backward_with_what_a_function_encloses(self):
        self.check(Encloses)

    def test_lengths_that_nobody_uses(self):
        self.check(Packed, on_refuse="raise")

    def test_storages(self):
        for name, make in {"resized": Reversible, **{name: looks_into(storage) for name, storage in STORAGES.items()}}.items():
            with self.subTest(name), self.assertLogs("remat", logging.WARNING) as told:
                self.check(make, plans=False)
            self.assertIn("a storage is used directly at ", told.output[0])

    def test_data_of_the_same_memory(self):
        with self.assertNoLogs("remat", logging.WARNING):
            self.check(OfItsType, on_refuse="raise")

    def test_data_of_other_memory(self):
        for put, planned in OTHERS.items():
            with self.subTest(put.__name__), self.assertNoLogs("remat", logging.WARNING) if planned else self.assertLogs("remat", logging.WARNING) as told:
                self.check(puts_others(put), plans=planned or None, budget="150% of activations")
            if not planned:
                self.assertIn("other memory is put under a tensor", told.output[0])

    def test_data_of_other_memory_while_somebody_sees_them(self):
        """Other code sees the memory that is replaced: through views in step 2, and through a step in flight in step 3."""
        def step(model, x, k):
            seen = [p.detach() for p in model.second.parameters()] if k == 2 else []
            first = model(x) if k == 3 else 0
            (model(x) + first).square().mean().backward()
            return [t.clone() for t in seen]

        self.check(puts_others(momentum), step, budget="300% of activations")


if __name__ == "__main__":
    unittest.main()
