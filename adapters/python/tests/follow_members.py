# SPDX-License-Identifier: Apache-2.0
"""Followed steps whose forward creates members of the model, or replaces their memory."""

import itertools
import logging
import unittest

import numpy
import torch
import torch.utils.dlpack
from torch import nn

import remat
from following import Net, Test, backward


def counting(model, x, k):
    """A step of a model that gets the number of the step. Updates the parameters without an optimizer, because members may be new."""
    model.k = k
    model.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    return [*model.parameters(), *(p.grad for p in model.parameters())]


class Members(Test):
    def check_named(self, make, why, step=counting, plans=True, **options):
        """Checks that steps equal eager mode, with exactly one warning, which contains `why`."""
        with self.assertLogs("remat", logging.WARNING) as logs:
            model = self.check(make, step, steps=6, plans=plans, **options)
        self.assertEqual(len(logs.output), 1)
        self.assertIn(why, logs.output[0])
        return model

    def test_parameter_made_of_an_activation(self):
        class Made(Net):
            def act(self, h):
                if not hasattr(self, "shift"):
                    self.shift = nn.Parameter(h.detach().mean(0))
                return h.tanh() + self.shift

        self.check_named(Made, "that collects a gradient")

    def test_layer_made_in_a_later_step(self):
        class Made(Net):
            def act(self, h):
                if self.k == 2:
                    self.more = nn.Linear(48, 48)
                return self.more(h) if self.k >= 2 else h.tanh()

        self.check_named(Made, "that collects a gradient")

    def test_leaf_kept_in_each_step(self):
        class Keeping(Net):
            def act(self, h):
                self.leaf = torch.zeros(48).requires_grad_()
                return h.tanh() + self.leaf

        def step(model, x, k):
            backward(model, x, k)
            return [model.leaf.grad]

        self.check_named(Keeping, "that collects a gradient", step, plans=False)

    def test_leaf_that_nobody_keeps(self):
        class Forgetting(Net):
            def act(self, h):
                return h.tanh() + torch.zeros(48).requires_grad_()

        with self.assertNoLogs("remat", logging.WARNING):
            self.check(Forgetting)

    def test_lazy_layers(self):
        class Lazy(Net):
            def begin(self):
                self.first, self.norm = nn.LazyLinear(48), nn.LazyBatchNorm1d()

        def step(model, x, k):
            if k == 3:
                model.last = nn.LazyLinear(16)
            return counting(model, x, k)

        def trained(wrap):
            torch.manual_seed(0)
            model, found = Lazy(), []
            if wrap:
                remat.wrap(model, budget="100% of activations", time_limit=1, gap=0.9, cache=False)
            for k in range(6):
                torch.manual_seed(k + 1)
                found += [t.detach().clone() for t in step(model, torch.randn(32, 16), k)] + [b.clone() for b in model.buffers()]
            return model, found

        _, plain = trained(False)
        with self.assertLogs("remat", logging.WARNING) as logs:
            model, planned = trained(True)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True)))
        self.assertTrue(all(".data" in line for line in logs.output))
        self.assertTrue(remat.of(model).plans)

    def test_memory_put_under_a_parameter(self):
        class Replacing(Net):
            steps = (0, 1, 2, 3, 4, 5)

            def act(self, h):
                if self.k in self.steps:
                    before = self.last.weight.data
                    with torch.no_grad():
                        self.last.weight.data = before * 0.9 + 0.01 * h.mean()
                return h.tanh()

        class Once(Replacing):
            steps = (0,)

        class Later(Replacing):
            steps = (2, 4)

        self.check_named(Replacing, ".data", plans=False)
        self.check_named(Once, ".data")
        self.check_named(Later, ".data")

    def test_memory_put_under_a_parameter_is_refused(self):
        class Replacing(Net):
            def act(self, h):
                before = self.last.weight.data
                self.last.weight.data = before * 0.9
                return h.tanh()

        model = remat.wrap(Replacing(), cache=False, on_refuse="raise")
        before = model.last.weight.clone()
        with self.assertRaisesRegex(remat.Refused, "copy_"):
            model(torch.randn(32, 16))
        self.assertTrue(torch.equal(before, model.last.weight))

    def test_arrays_over_activations(self):
        """A numpy array over an activation, which is written after the forward and read in the next forward."""
        class Keeping(Net):
            steps = (0, 1, 2, 3, 4, 5)
            array = None

            def act(self, h):
                h = h.tanh()
                if self.array is not None:
                    h = h + float(self.array.mean())
                self.array = h.detach().numpy() if self.k in self.steps else None
                return h * 2

        class Once(Keeping):
            steps = (0,)

        class Later(Keeping):
            steps = (2, 4)

        def step(model, x, k):
            found = counting(model, x, k)
            if model.array is None:
                return found
            model.array[0] += 1
            return [*found, torch.from_numpy(model.array.copy())]

        self.check_named(Keeping, "an array over that memory", step, plans=False)
        self.check_named(Once, "an array over that memory", step)
        self.check_named(Later, "an array over that memory", step)

    def test_memory_for_other_libraries(self):
        takes = {
            "a tensor": torch.from_dlpack, "a capsule": lambda t: torch.from_dlpack(t.__dlpack__()), "an old capsule": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
            "an array": lambda t: torch.as_tensor(numpy.from_dlpack(t)), "pinned": lambda t: t * (2 if t.is_pinned() else 3),
            "a device": lambda t: t * int(t.__dlpack_device__()[0]), "written": lambda t: torch.from_dlpack(t).mul_(2) + t,
            "of a constant": lambda t: torch.from_dlpack(torch.arange(48.0)) * t.mean(), "of a parameter": lambda t: t}

        for name, take in takes.items():
            class Lends(Net):
                def act(self, h):
                    return h.tanh() + take(h.detach() * 2) * take(self.norm.bias.detach())

            with self.subTest(name):
                self.check(Lends, plans=name != "written")  # it writes a weight

    def test_parameters_frozen_and_thawed(self):
        class Freezing(Net):
            def act(self, h):
                self.last.weight.requires_grad_(self.k % 3 != 1)
                return h.tanh()

        self.check_named(Freezing, "requires a gradient")

    def test_memory_that_is_filled_by_hand(self):
        def new(model, size=48):
            t = torch.empty(size)
            t.numpy()[:] = model.k
            return t

        def viewed(model):
            return new(model).view(6, 8).t().reshape(48)

        def large(model):
            return new(model, 300_000).mean()

        def kept(model):
            model.array[:] = model.k
            return model.view * 2

        def written(model):
            model.array[:] = model.k
            return torch.from_numpy(model.array).add_(1)

        def shown(model):
            zeros = torch.zeros(300_000)
            array, total = zeros.numpy(), zeros.sum()
            other = torch.full((300_000,), 9.0)
            return total + float(array[:3].sum()) + other[0] / 9

        for fill in (new, viewed, large, kept, written, shown):
            class Fills(Net):
                def begin(self):
                    self.array = numpy.zeros(48, numpy.float32)
                    self.view = torch.from_numpy(self.array)

                def act(self, h):
                    return h.tanh() * fill(self)

            with self.subTest(fill.__name__):
                self.check(Fills, counting)

    def test_parameters_frozen_before_the_backward(self):
        """The gradients that are there stay as they are."""
        def step(model, x, k):
            backward(model, x, k)
            loss = model(2 * x).square().mean()
            model.first.weight.requires_grad_(False)
            loss.backward()
            model.first.weight.requires_grad_(True)

        self.check(Net, step)

    def test_parameters_frozen_before_another_use_of_the_outputs(self):
        """The backward that is recorded then is one for later steps, too."""
        class Two(Net):
            def forward(self, x):
                h = self.first(x).tanh()
                return self.last(h), h

        def step(model, x, k):
            y, h = model(x)
            model.last.bias.requires_grad_(k != 2)
            (y.mean() + h.square().mean() if k < 2 else y.square().mean()).backward(retain_graph=k == 3)
            model.last.bias.requires_grad_(True)
            if k == 3:
                model.first.bias.requires_grad_(False)
                h.sum().backward()
                model.first.bias.requires_grad_(True)

        self.check(Two, step, steps=6)

    def test_buffers_that_an_operator_resizes(self):
        """Quantization-aware training per channel. The first step resizes the buffers `low` and `high`, and runs unplanned."""
        class Quantized(Net):
            def begin(self):
                for name, value in (("low", torch.empty(0)), ("high", torch.empty(0)), ("scale", torch.ones(48)), ("zero", torch.zeros(48, dtype=torch.int)),
                                    ("on", torch.ones(1, dtype=torch.long))):
                    self.register_buffer(name, value)

            def act(self, h):
                observed = torch.fused_moving_avg_obs_fake_quant
                return observed((h * 2).T, self.on, self.on, self.low, self.high, self.scale, self.zero, 0.01, -128, 127, 0, True, True).T

        self.check_named(Quantized, "resizes or replaces the storage of a tensor", lambda m, x, k: [*counting(m, x, k), m.low, m.high, m.scale], budget="10 MiB")


class Constants(Test):
    """Tensors that the module makes in a forward and keeps, and that other code reads between the steps."""

    def test_kept(self):
        makers = {"zeros": lambda: torch.zeros(48), "ones": lambda: torch.ones(48), "full": lambda: torch.full((48,), 3.0), "arange": lambda: torch.arange(48.0),
                  "eye": lambda: torch.eye(48)[3], "tensor": lambda: torch.tensor([2.0] * 48), "written": lambda: torch.zeros(48).add_(2)}
        for name, make in makers.items():
            for buffer, used, always in itertools.product((False, True), repeat=3):
                class Keeps(Net):
                    def begin(self):
                        self.kept = None
                        if buffer:
                            del self.kept
                            self.register_buffer("kept", torch.zeros(1))

                    def act(self, h):
                        if always or self.kept is None or len(self.kept) == 1:
                            self.kept = make()
                        return (h + self.kept if used else h).tanh()

                def step(model, x, k):
                    y = model(x)
                    seen = model.kept.clone()
                    y.square().mean().backward()
                    return [seen, model.kept]

                with self.subTest(name, buffer=buffer, used=used, always=always), self.assertNoLogs("remat", logging.WARNING):
                    self.check(Keeps, step, steps=4)

    def test_returned(self):
        """The module returns a constant, and uses others that no code holds. These take memory in the plan only."""
        class Returns(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

            def forward(self, x):
                for k, layer in enumerate(self.layers):
                    mask = torch.ones(256, 256).tril(k) == 0
                    scores = layer(x) @ x.T
                    x = x + scores.masked_fill(mask, -10).softmax(-1) @ x
                return x.square().mean(), torch.zeros(4)

        torch.manual_seed(0)
        model = Returns()
        session = remat.of(remat.wrap(model, budget=1, planner=remat.Planner(time_limit=1), cache=False))
        with self.assertRaises(remat.OverBudget) as seen:
            model(torch.randn(256, 128))
        session.set_budget(seen.exception.needed)
        for k in range(4):
            model.zero_grad()
            x = torch.randn(256, 128)
            session.reset_peak()
            loss, state = model(x)
            loss.backward()
            self.assertTrue(torch.equal(state, torch.zeros(4)))
            if k:
                held = session.memory()
                self.assertLessEqual(held["peak"], held["budget"], f"step {k}")


class Inference(Test):
    """Tensors of inference mode, whose operators come without autograd."""

    def test_constants(self):
        class Cached(Net):
            table = None

            def act(self, h):
                if self.table is None:
                    self.table = torch.arange(48.0).sin()
                return h.tanh() + self.table.double().to(h.dtype)

        def step(model, x, k):
            with torch.inference_mode():
                model.eval()
                seen = model(x)
                model.train()
            backward(model, x, k)
            return [seen]

        self.check(Cached, step)

        class KeepsOther(Net):
            """It keeps a tensor over the memory of a constant that no operator gave."""

            def act(self, h):
                self.kept = torch.ones(48).data
                return h.tanh() + torch.ones_like(self.kept) - self.kept * 0.5

        with self.assertNoLogs("remat", logging.WARNING):
            model = self.check(KeepsOther, steps=6)
        self.assertEqual(len(remat.of(model).plans), 1)

    def test_arguments(self):
        def step(model, x, k):
            with torch.inference_mode():
                x = x.clone()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()

        self.check(Net, step)

    def test_parts(self):
        class Teacher(Net):
            def begin(self):
                self.cell, self.filter = nn.GRUCell(48, 48), nn.Conv1d(1, 1, 3, padding=1)

            def act(self, h):
                with torch.inference_mode():
                    low, high = self.filter(self.cell(h).double().float().unsqueeze(1)).squeeze(1).chunk(2, 1)
                    target = self.drop(torch.cat([high, low], 1))
                return h.tanh() + target

        self.check(Teacher)


if __name__ == "__main__":
    unittest.main()
