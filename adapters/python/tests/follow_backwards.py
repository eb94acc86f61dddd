# SPDX-License-Identifier: Apache-2.0
"""Backwards of followed steps: with code of the user, unusual backwards, other uses of the outputs."""

import logging
import unittest

import torch
from torch import nn

import remat
from following import Net, STATES, Shows, Test, backward


class Backward(Test):
    """Backwards without a plan run on the graph that the module's code has built. Code of the user in a backward runs in every step."""

    def test_state_read_by_a_custom_function(self):
        for name, (make, read, change) in STATES.items():
            class Function(torch.autograd.Function):
                @staticmethod
                def forward(ctx, h, model):
                    ctx.model = model
                    ctx.save_for_backward(h)
                    return h * 2

                @staticmethod
                def backward(ctx, g):
                    h, = ctx.saved_tensors
                    return g * read(ctx.model) + h * 0.1, None

            class Reads(Net):
                def begin(self):
                    make(self)

                def act(self, h):
                    return Function.apply(h.tanh(), self)

            def step(model, x, k):
                if k >= 2:
                    change(model, 2.0 + k)
                backward(model, x, k)

            with self.subTest(name):
                self.check(Reads, step, plans=None)  # the last step may have dropped its plan

    def test_custom_backwards(self):
        """Steps with a custom backward that reads a value run unplanned, also when planning is tried again."""
        def branch(x):
            return 1 if x.sum() > 0 else 0.5

        def number(x):
            return float(x.mean())

        def array(x):
            return float(x.cpu().numpy().max())

        def positions(x):
            return len(x.nonzero()) / x.numel()

        def wrong_once(x):
            try:
                return int("one")
            except ValueError:
                return float(x.mean())

        for factor in (branch, number, array, positions, wrong_once):
            class Custom(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    ctx.save_for_backward(x)
                    return 2 * x

                @staticmethod
                def backward(ctx, gradient):
                    return gradient * factor(*ctx.saved_tensors)

            class Reads(Net):
                def act(self, h):
                    return Custom.apply(h).tanh()

            with self.subTest(factor=factor.__name__):
                self.check(Reads, plans=False)

    def test_memory_after_a_backward_of_the_graph(self):
        """After a backward of the graph, only the output is held."""
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, g):
                return g * factor

        class Deep(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

            def forward(self, x):
                for layer in self.layers:
                    x = Function.apply(layer(x).tanh())
                return x

        model, x, live = remat.wrap(Deep(), cache=False, time_limit=1, gap=0.9), torch.randn(1024, 256), []
        for factor in (1.0, 1.0, 2.0, 3.0):  # the last two backwards run on the graph
            y = model(x)
            y.sum().backward()
            model.zero_grad()
            remat.of(model).release()
            live.append(remat.of(model).memory()["live"])
        self.assertLess(max(live) - live[0], y.nbytes / 2)

    def test_graph_of_gradients(self):
        def penalty(model, x, k):
            x.requires_grad_()
            y = model(x)
            g, = torch.autograd.grad(y.sum(), x, create_graph=True)
            (y.square().mean() + g.square().mean()).backward()
            return [g]

        def meta(model, x, k):
            loss = model(x).square().mean()
            sum(g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters()), create_graph=True)).backward()

        for step in (penalty, meta):
            for first in (0, 2):
                with self.assertLogs("remat", logging.WARNING) as seen:
                    self.check(Net, lambda m, x, k: (step if k >= first else backward)(m, x, k))
                self.assertEqual(len(seen.output), 1)

    def test_several_backwards(self):
        def twice(model, x, k):
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            if k != 1:
                loss.backward()

        def two_losses(model, x, k):
            y = model(x)
            y.square().mean().backward(retain_graph=True)
            y.abs().mean().backward()

        self.check(Net, twice)
        self.check(Net, two_losses)

    def test_a_freed_graph(self):
        model = remat.wrap(Net())
        loss = model(torch.randn(8, 16)).sum()
        loss.backward()
        with self.assertRaisesRegex(RuntimeError, "second time"):
            loss.backward()

    def test_hooks_and_retained_gradients_inside(self):
        def hook(model, x, k):
            seen = []
            model.see = (lambda h: h.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])) if k > 1 else None
            backward(model, x, k)
            self.assertEqual(len(seen), k > 1)
            return seen

        def hook_later(model, x, k):
            held = []
            model.see = held.append
            y = model(x)
            held[0].register_hook(lambda g: g * 2)
            y.square().mean().backward()
            model.see = None

        def retained(model, x, k):
            held = []
            model.see = held.append
            y = model(x)
            held[0].retain_grad()
            y.square().mean().backward()
            model.see = None
            return [held[0].grad]

        def of_modules(model, x, k):
            seen = []
            handle = model.norm.register_full_backward_hook(lambda m, i, o: seen.append(o[0].clone())) if k > 1 else None
            backward(model, x, k)
            if handle is not None:
                handle.remove()
            return seen

        for step in (hook, hook_later, retained, of_modules):
            with self.subTest(step.__name__):
                self.check(Shows, step)

    def test_tensors_that_the_module_keeps(self):
        """The module keeps an auxiliary loss and a view. Some losses use them, so they get gradients."""
        class Keeps(Net):
            def act(self, h):
                y = h.tanh()
                self.extra, self.view = y.square().mean(), y[:, :3]
                return y

        def step(model, x, k):
            loss = model(x).square().mean()
            if k not in (0, 5):
                loss = loss + 0.3 * model.extra
            if k in (3, 5):
                loss = loss + model.view.sum()
            loss.backward()
            return [loss, model.extra, model.view]

        with self.assertLogs("remat", logging.WARNING) as told:
            self.check(Keeps, step, 8)
        for text in told.output:  # no warning about an unplanned step
            self.assertIn("The outputs of before take", text)

    def test_tensors_that_a_function_keeps(self):
        """Tensors that a custom function keeps in its context until the backward do not count as kept by the module."""
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, scale):
                ctx.x, ctx.all = x, [x * scale, {"scale": scale}]
                return ctx.all[0] * x

            @staticmethod
            def backward(ctx, g):
                return 2 * g * ctx.all[1]["scale"] * ctx.x, (g * ctx.x * ctx.x).sum()

        class Squares(Net):
            def begin(self):
                self.scale = nn.Parameter(torch.tensor(0.5))

            def act(self, h):
                h = Square.apply(h.tanh(), self.scale)
                self.extra = h.mean()
                return h

        with self.assertNoLogs("remat", logging.WARNING):
            self.check(Squares, lambda m, x, k: (m(x).square().mean() + (m.extra if k % 2 else 0)).backward())

    def test_hooks_of_outputs(self):
        """Hooks of outputs that feed other outputs, and of returned parameters."""
        class Several(Net):
            def forward(self, x):
                y = super().forward(x)
                return self.last.bias, y, y.tanh()

        def step(model, x, k):
            b, y, z = model(x)
            seen = []
            if k in (1, 3):
                y.register_hook(lambda g: seen.append(g.clone()))
            if k == 4:
                z.register_hook(lambda g: seen.append(g.clone()))
            if k == 2:
                y.retain_grad()
            (b.sum() + y.square().mean() + z.mean()).backward()
            return [*seen, y.grad if k == 2 else y]

        self.check(Several, step, 6)

    def test_modes(self):
        def anomaly(model, x, k):
            y = model(x)
            with torch.autograd.set_detect_anomaly(k == 2):
                y.square().mean().backward()

        def autocast(model, x, k):
            y = model(x)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=k > 1):
                y.square().mean().backward()

        self.check(Net, anomaly)
        self.check(Net, autocast)


class Heads(nn.Module):
    """A model with two outputs, each from its own layer."""

    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x):
        h = self.body(x).relu()
        return self.a(h), self.b(h)


@torch.jit.script
def scripted(x, b):
    y = x + b
    return y * 0.5 * (1.0 + torch.erf(y * 0.7))


class Uses(Test):
    def test_scripted_functions(self):
        """TorchScript recompiles functions in the first steps, so the first recorded backwards differ from later ones."""
        class Scripted(Net):
            def act(self, h):
                return scripted(h, self.first.bias)

        def step(model, x, k):
            logging.getLogger("remat").warning(f"step {k}")
            backward(model, x, k)

        with self.assertLogs("remat", logging.WARNING) as told:
            self.check(Scripted, step, steps=10)
        ends = [text.rpartition(":")[2] for text in told.output][-6:]
        self.assertEqual(ends, [f"step {k}" for k in range(4, 10)])

    def test_other_uses_of_buffers_that_the_forward_writes(self):
        """The gradient of the first loss has an unexpected layout, while the backward needs a buffer that the forward has written."""
        class Scales(Net):
            def begin(self):
                self.register_buffer("scale", torch.ones(48))

            def act(self, h):
                with torch.no_grad():
                    self.scale.mul_(0.9).add_(0.1)
                return h.tanh() * self.scale

        def step(model, x, k):
            (model(x).sum() if k % 2 == 0 else model(x).square().sum()).backward()

        with self.assertNoLogs("remat", logging.WARNING):
            self.check(Scales, step, steps=6)

    def test_other_uses_of_buffers_that_a_list_writes(self):
        """Kernels of `_foreach` operators increase version counters themselves. These kernels do not run while a forward is followed."""
        class Scales(Net):
            def begin(self):
                self.register_buffer("scale", torch.ones(48))
                self.register_buffer("other", torch.ones(48))

            def act(self, h):
                with torch.no_grad():
                    torch._foreach_lerp_([self.scale, self.other], [h.mean(0), h.square().mean(0)], 0.5)
                return h.tanh() * self.scale * self.other

        def step(model, x, k):
            (0.001 * model(x).sum() if k % 4 == 3 else model(x).square().mean()).backward()

        with self.assertNoLogs("remat", logging.WARNING):
            self.check(Scales, step, steps=8)

    def test_gradients_of_each_output(self):
        """Two backwards per forward: the first for one output, which needs a new plan, the second for the other output."""
        def step(model, x, k):
            leaves = list(model.parameters())
            for loss in (lambda a, b: a.square().mean(), lambda a, b: b.sin().mean())[::1 if k % 3 else -1]:
                outputs = model(x) if k % 2 else outputs if "outputs" in locals() else model(x)
                for p, g in zip(leaves, torch.autograd.grad(loss(*outputs), leaves, retain_graph=True, allow_unused=True), strict=True):
                    if g is not None:
                        p.grad = g if p.grad is None else p.grad + g

        self.check(Heads, step, steps=8)

    def test_outputs_of_other_shapes(self):
        """The strides of the last gradients do not fit the outputs that another path returns: too many, or elements would overlap."""
        class Kinds(Net):
            def forward(self, x, kind):
                y = super().forward(x)
                return [(y,), y.unbind(1), (y.repeat(2, 1),)][kind]

        def step(model, x, k):
            sum(y.t().contiguous().square().mean() for y in model(x, k % 3)).backward()

        with self.assertNoLogs("remat", logging.WARNING):
            self.check(Kinds, step, steps=9)

    def test_constants_are_returned(self):
        """Python's binding of a factory returns a copy of its result to the module."""
        class Labels(Net):
            def forward(self, x):
                return super().forward(x), torch.zeros(32, dtype=torch.long)

        def step(model, x, k):
            y, labels = model(x)
            nn.functional.cross_entropy(y, labels).backward()
            return [labels]

        self.check(Labels, step)


if __name__ == "__main__":
    unittest.main()
