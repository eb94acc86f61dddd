# SPDX-License-Identifier: Apache-2.0
"""Planned steps run the module's own code: whatever it reads, keeps, raises or is told of is as in eager mode, bit by bit."""

import array
import collections
import contextlib
import functools
import gc
import io
import itertools
import logging
import types
import unittest
import weakref

import numpy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat


class Net(nn.Module):
    """Layers with a batch norm and dropout. `act` is applied in the middle."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 48), nn.BatchNorm1d(48), nn.Linear(48, 16)
        self.drop = nn.Dropout(0.2)
        self.begin()

    def begin(self):
        pass

    def act(self, h):
        return h.tanh()

    def forward(self, x, *rest, **more):
        h = self.act(self.norm(self.first(x)))
        return self.last(self.drop(h))


def backward(model, x, k):
    model(x).square().mean().backward()


def trained(make, step, steps, wrap):
    """The model, and what its steps leave."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if wrap is not None:
        remat.wrap(model, **{"budget": "100%", "time_limit": 1, "cache": False, **wrap})
    return model, left_by_steps(model, optimizer, step, steps)


def left_by_steps(model, optimizer, step, steps, generators=(torch,)):
    """Per step what `step` returns, parameters, gradients, buffers, states of generators."""
    found = []
    for k in range(steps):
        torch.manual_seed(k + 1)
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        result = step(model, x, k)
        optimizer.step()
        tensors = [*(result or ()), *model.parameters(), *(p.grad for p in model.parameters()), *model.buffers(), *(g.get_rng_state() for g in generators)]
        found.append([t if t is None else t.detach().cpu().clone() for t in tensors])
    return found


def same(a, b):
    return len(a) == len(b) and all((s is None) == (t is None) and (s is None or torch.equal(s, t)) for s, t in zip(a, b))


class Test(unittest.TestCase):
    def check(self, make, step=backward, steps=5, exact=True, **options):
        """@return the wrapped model"""
        _, plain = trained(make, step, steps, None)
        model, planned = trained(make, step, steps, options)
        for k, (a, b) in enumerate(zip(plain, planned, strict=True)):
            if exact:
                self.assertTrue(same(a, b), f"step {k}")
            else:
                self.assertTrue(all(torch.allclose(s, t, atol=1e-5) for s, t in zip(a[:-1], b[:-1])), f"step {k}")
        return model


class Configuration:
    scale = 2.0


class Scaled:
    def __init__(self):
        self.scale = 2.0

    def __call__(self, h):
        return h * self.scale


GLOBAL = 2.0


def nested(depth, value):
    return {"a": nested(depth - 1, value)} if depth else value


def innermost(d):
    while isinstance(d["a"], dict):
        d = d["a"]
    return d


def cell():
    value = [2.0]
    return (lambda: value[0]), (lambda v: value.__setitem__(0, v))


def set_global(model, v):
    global GLOBAL
    GLOBAL = v


#: per kind of state: what makes it, what reads a number, what changes it
STATES = {
    "number": (lambda m: setattr(m, "s", 2.0), lambda m: m.s, lambda m, v: setattr(m, "s", v)),
    "numpy array": (lambda m: setattr(m, "s", numpy.array([2.0])), lambda m: float(m.s[0]), lambda m, v: m.s.__setitem__(0, v)),
    "array": (lambda m: setattr(m, "s", array.array("d", [2.0])), lambda m: m.s[0], lambda m, v: m.s.__setitem__(0, v)),
    "class attribute": (lambda m: setattr(type(m), "s", 2.0), lambda m: m.s, lambda m, v: setattr(type(m), "s", v)),
    "class": (lambda m: setattr(Configuration, "scale", 2.0), lambda m: Configuration.scale, lambda m, v: setattr(Configuration, "scale", v)),
    "global": (lambda m: set_global(m, 2.0), lambda m: GLOBAL, set_global),
    "nested": (lambda m: setattr(m, "s", nested(9, 2.0)), lambda m: innermost(m.s)["a"], lambda m, v: innermost(m.s).__setitem__("a", v)),
    "deque": (lambda m: setattr(m, "s", collections.deque([2.0])), lambda m: m.s[0], lambda m, v: m.s.__setitem__(0, v)),
    "closure": (lambda m: setattr(m, "s", cell()), lambda m: m.s[0](), lambda m, v: m.s[1](v)),
    "object": (lambda m: setattr(m, "s", Scaled()), lambda m: m.s.scale, lambda m, v: setattr(m.s, "scale", v)),
    "bound method": (lambda m: setattr(m, "s", Scaled().__call__), lambda m: m.s(1.0), lambda m, v: setattr(m.s.__self__, "scale", v)),
    "partial": (lambda m: setattr(m, "s", functools.partial(float, 2.0)), lambda m: m.s(), lambda m, v: setattr(m, "s", functools.partial(float, v))),
    "iterator": (lambda m: setattr(m, "s", itertools.cycle([2.0, 3.0, 5.0])), lambda m: next(m.s), lambda m, v: next(m.s)),
    "generator": (lambda m: setattr(m, "s", (float(n) for n in itertools.count(2))), lambda m: next(m.s), lambda m, v: next(m.s)),
    "default of a function": (lambda m: setattr(m, "s", types.FunctionType((lambda v=2.0: v).__code__, {}, "f", (2.0,))), lambda m: m.s(),
                              lambda m, v: setattr(m.s, "__defaults__", (v,))),
    "file": (lambda m: setattr(m, "s", io.StringIO("2.0")), lambda m: float(m.s.getvalue()), lambda m, v: setattr(m, "s", io.StringIO(str(v)))),
    "plain tensor": (lambda m: setattr(m, "s", [torch.tensor(2.0)]), lambda m: m.s[0], lambda m, v: m.s[0].fill_(v)),
    "other tensor": (lambda m: setattr(m, "s", [torch.tensor(2.0)]), lambda m: m.s[0], lambda m, v: m.s.__setitem__(0, torch.tensor(v))),
}


class State(Test):
    """What is changed between two steps."""

    def test_read_by_the_forward(self):
        for name, (make, read, change) in STATES.items():
            class Reads(Net):
                def begin(self):
                    make(self)

                def act(self, h):
                    return (h * read(self)).tanh()

            def step(model, x, k):
                if k >= 2:
                    change(model, 2.0 + k)
                backward(model, x, k)

            with self.subTest(name):
                self.check(Reads, step)

    def test_seeds(self):
        """The forward sets or reads the state of the generator, which is another one in each step."""
        def seeded(model, h, k):
            torch.manual_seed(k)
            return h

        def forked(model, h, k):
            with torch.random.fork_rng():
                torch.manual_seed(k)
                return h * torch.rand(())

        def read(model, h, k):
            model.states.append(torch.get_rng_state())
            return h

        for act in (seeded, forked, read, lambda model, h, k: seeded(model, h, k) if k % 3 == 0 else h):
            for drawn in (False, True):
                class Seeds(Net):
                    def begin(self):
                        self.steps, self.states = 0, []

                    def act(self, h):
                        self.steps += 1
                        return act(self, h + torch.rand(()) if drawn else h, self.steps)

                with self.subTest(act.__name__, drawn=drawn):
                    self.check(Seeds, steps=7)

    def test_every_step_is_planned(self):
        """Views in place, and results of factories, which Python's binding copies while somebody else holds them."""
        class Views(Net):
            def act(self, h):
                rows = torch.arange(h.shape[0], dtype=h.dtype) + 1
                turned = (h * rows[:, None]).contiguous()
                turned.transpose_(0, 1)
                return turned.mean((0,), keepdim=True).squeeze_(0)[:, None] * h

        with self.assertLogs("remat", logging.INFO) as seen:
            self.check(Views)
        self.assertFalse([record for record in seen.records if record.levelno > logging.INFO])
        self.assertFalse([line for line in seen.output if "leaves the planned path" in line])

    def test_paths(self):
        """The state tells which way the forward takes."""
        for name, (make, read, change) in STATES.items():
            class Reads(Net):
                def begin(self):
                    make(self)

                def act(self, h):
                    return h.tanh() if float(read(self)) < 3.5 else h.relu() * 2

            def step(model, x, k):
                if k in (2, 4):
                    change(model, (2.0, 4.0)[k == 2])
                backward(model, x, k)

            with self.subTest(name):
                self.check(Reads, step, steps=6)

    def test_counters_and_lists(self):
        class Counts(Net):
            def begin(self):
                self.calls, self.list = 0, []

            def act(self, h):
                self.calls += 1
                self.list.append(self.calls)
                return h / self.calls

        self.assertEqual((lambda m: (m.calls, m.list))(self.check(Counts)), (5, [1, 2, 3, 4, 5]))

    def test_tensors_from_step_to_step(self):
        class Keeps(Net):
            def begin(self):
                self.h = None

            def act(self, h):
                y = h.tanh() if self.h is None else (h + self.h).tanh()
                self.h = y.detach()
                return y

        self.check(Keeps, lambda m, x, k: (backward(m, x, k), [m.h])[1])

    def test_values(self):
        """Those that no plan can have: see follow_values.py for the others."""
        class Sparse(Net):
            def act(self, h):
                return h.tanh() + h.detach().to_sparse().to_dense()

        class Scatters(Net):
            def act(self, h):
                return h.masked_scatter(h.detach() > 0.5, h.tanh().flatten()) * 2

        for kind in (Sparse, Scatters):
            with self.subTest(kind.__name__), self.assertLogs("remat", logging.WARNING) as seen:
                self.check(kind)
                self.assertEqual(len(seen.output), 1)

    def test_arguments(self):
        class Strange(Net):
            def forward(self, x, *rest):
                rest[0]["y"] = super().forward(x)
                return rest[0]["y"]

        for other in (object(), lambda: 1, torch.Generator(), io.StringIO()):
            def step(model, x, k):
                batch = {"x": x, "other": other}
                model(x, batch).sum().backward()
                self.assertEqual(list(batch), ["x", "other", "y"])

            self.check(Strange, step)

    def test_layers_that_are_left_out(self):
        class Drops(Net):
            def act(self, h):
                for _ in range(3):
                    if torch.rand(()).item() < 0.5:
                        h = self.norm(h).tanh()
                return h

        self.check(Drops, steps=8)

    def test_forward_hooks(self):
        def step(model, x, k):
            seen = []
            handle = model.first.register_forward_hook(lambda m, a, y: (seen.append(k), y * (k + 1))[1])
            backward(model, x, k)
            handle.remove()
            self.assertEqual(seen, [k])

        self.check(Net, step)

    def test_exceptions(self):
        class Raises(Net):
            def act(self, h):
                if self.fails:
                    raise LookupError("as it is")
                return h.tanh()

        def step(model, x, k):
            model.fails = k in (0, 3)
            with self.assertRaisesRegex(LookupError, "as it is") if model.fails else contextlib.nullcontext():
                model(x).sum().backward()

        self.check(Raises, step)

    def test_checkpoints_inside(self):
        for reentrant in (False, True):
            class Segments(Net):
                def act(self, h):
                    for _ in range(2):
                        h = checkpoint(lambda t: self.drop(t.tanh()), h, use_reentrant=reentrant)
                    return h

            with self.subTest(reentrant=reentrant), self.assertNoLogs("remat", logging.WARNING):
                self.check(Segments)


class Backward(Test):
    """Backwards that no plan does: the graph that the module's code has built does them. Code of the user in a backward runs in every step."""

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

            if name not in ("iterator", "generator"):  # in the first step, the backward is recorded before it runs
                with self.subTest(name):
                    self.check(Reads, step)

    def test_memory_after_a_backward_of_the_graph(self):
        """While the output is held, nothing else is."""
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

        model, x, live = remat.wrap(Deep(), cache=False, time_limit=1), torch.randn(1024, 256), []
        for factor in (1.0, 1.0, 2.0, 3.0):  # the last ones are those of the graph
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
                    self.check(Net, lambda m, x, k: (step if k >= first else backward)(m, x, k), exact=False)
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
        class Shows(Net):
            def begin(self):
                self.see = None

            def act(self, h):
                y = h.tanh()
                if self.see is not None:
                    self.see(y)
                return y

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
        """With their gradients: an auxiliary loss and a view, which the loss uses now and then."""
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

        with self.assertNoLogs("remat", logging.WARNING):
            self.check(Keeps, step, 8)

    def test_tensors_that_a_function_keeps(self):
        """In its context, until its backward: these are not the module's."""
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
        """From which other outputs come, and of parameters that are returned."""
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
    """Two outputs, each with layers of its own."""

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
        """TorchScript compiles them anew in the first steps, so the recorded backwards are others than later ones."""
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

    def test_gradients_of_each_output(self):
        """The first backward is for one output, and is planned anew; the second for the other one."""
        def step(model, x, k):
            leaves = list(model.parameters())
            for loss in (lambda a, b: a.square().mean(), lambda a, b: b.sin().mean())[::1 if k % 3 else -1]:
                outputs = model(x) if k % 2 else outputs if "outputs" in locals() else model(x)
                for p, g in zip(leaves, torch.autograd.grad(loss(*outputs), leaves, retain_graph=True, allow_unused=True), strict=True):
                    if g is not None:
                        p.grad = g if p.grad is None else p.grad + g

        self.check(Heads, step, steps=8)


    def test_constants_are_returned(self):
        """Python's binding gives the module a copy of what a factory makes."""
        class Labels(Net):
            def forward(self, x):
                return super().forward(x), torch.zeros(32, dtype=torch.long)

        def step(model, x, k):
            y, labels = model(x)
            nn.functional.cross_entropy(y, labels).backward()
            return [labels]

        self.check(Labels, step)


class Checkpoints(Test):
    """Eager mode runs a part under a checkpoint twice, and writes running statistics twice."""

    def test_inside(self):
        for reentrant in (False, True):
            class Recomputed(Net):
                def begin(self):
                    self.register_buffer("calls", torch.zeros(()))

                def part(self, h):
                    h = self.norm(self.drop(h)).tanh()
                    self.calls += 1  # behind all that the backward needs
                    return h

                def act(self, h):
                    h = checkpoint(self.part, h, use_reentrant=reentrant).sin()
                    return checkpoint(lambda t: self.norm(t) * 2, h, use_reentrant=reentrant)

            for follow in (True,) if reentrant else (True, False):
                with self.subTest(reentrant=reentrant, follow=follow), self.assertNoLogs("remat", logging.WARNING):
                    self.check(Recomputed, follow=follow)

    def test_around(self):
        def step(model, x, k):
            checkpoint(model, x, use_reentrant=False).square().mean().backward()

        def on_host(model, x, k):
            with torch.autograd.graph.save_on_cpu():
                y = model(x)
            y.square().mean().backward()

        for act in (step, on_host):
            with self.subTest(act.__name__), self.assertLogs("remat", logging.WARNING) as seen:
                self.check(Net, act)
            self.assertEqual(len(seen.output), 1)


class Asks(unittest.TestCase):
    def test_session_within_its_forward(self):
        """An error, not a wait for itself; the next steps are planned."""
        class Looks(Net):
            def act(self, h):
                self.bytes = remat.of(self).memory()["peak"] if self.looks else 0
                return h.tanh()

        model, x = remat.wrap(Looks(), cache=False), torch.randn(8, 16)
        model.looks = True
        with self.assertRaisesRegex(remat.Error, "cannot be asked by a forward"):
            model(x)
        model.looks = False
        model(x).sum().backward()


class Strict(Test):
    """on_refuse="raise": no number is produced, and all is left as it was."""

    def test_named(self):
        class Sparse(Net):
            def act(self, h):
                return h + h.detach().to_sparse().to_dense()  # the line

        model, x = remat.wrap(Sparse(), on_refuse="raise", cache=False), torch.randn(8, 16)
        before, state = [b.clone() for b in model.buffers()], torch.get_rng_state()
        with self.assertRaises(remat.Refused) as e:
            model(x)
        self.assertEqual(e.exception.operator, "aten::_to_sparse")
        self.assertIn("# the line", e.exception.source)
        self.assertTrue(same(before, list(model.buffers())))
        self.assertTrue(torch.equal(state, torch.get_rng_state()))

        class Reads(Net):
            def act(self, h):
                try:
                    return h * self.norm.running_mean.numpy().std().item()
                except Exception:  # hides nothing
                    return h

        model = remat.wrap(Reads(), on_refuse="raise", cache=False)
        with self.assertRaisesRegex(remat.Refused, "numpy"):
            model(x)
        self.assertTrue(same(before, list(model.buffers())))

    def test_other_parameters_in_each_call(self):
        """`torch.func.functional_call`, fast weights, parameters that are replaced: one plan serves them all."""
        from torch.func import functional_call

        def copies(model, k):
            return {n: (p.detach() * (1 + 0.1 * k)).requires_grad_(p.requires_grad) for n, p in model.named_parameters()}

        def leaves(model, x, k):
            others = copies(model, k)
            loss = functional_call(model, others, (x,)).square().mean()
            return torch.autograd.grad(loss, list(others.values()))

        def and_its_own(model, x, k):
            others = copies(model, k)
            (functional_call(model, others, (x,)) * model(x)).mean().backward()
            return [p.grad for p in others.values()]

        def some(model, x, k):
            others = {"first.weight": model.first.weight * 0.9, "norm.running_mean": torch.full((48,), 0.1 * k)}
            functional_call(model, others, (x,)).square().mean().backward()
            return [others["norm.running_mean"]]

        def steps_ahead(model, x, k):
            """The gradient of the second step is taken with respect to the weights before the first one."""
            fast = dict(model.named_parameters())
            for _ in range(2):
                loss = functional_call(model, fast, (x,)).square().mean()
                gradients = torch.autograd.grad(loss, list(fast.values()))
                fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), gradients)}
            functional_call(model, fast, (x,)).square().mean().backward()

        def several_tasks(model, x, k):
            total = 0
            for task in range(3):
                own = {n: p + 0.01 * task for n, p in model.named_parameters()}
                total = total + functional_call(model, own, (x * task,)).square().mean()
            total.backward()

        def replaced(model, x, k):
            backward(model, x, k)
            old = [p.grad for p in model.parameters()]
            model.first = nn.Linear(16, 48)
            model.last.weight = nn.Parameter(model.last.weight.detach() * 0.5)
            model.norm.register_buffer("running_var", torch.rand(48))
            backward(model, x, k)
            return old

        def frozen(model, x, k):
            model.last.requires_grad_(k % 2 == 0)
            own = {n: p.detach().clone().requires_grad_(n.startswith("first")) for n, p in model.named_parameters()}
            (functional_call(model, own, (x,)) + model(x)).square().mean().backward()
            return [own["first.weight"].grad]

        for step in (leaves, and_its_own, some, steps_ahead, several_tasks, replaced, frozen):
            with self.subTest(step=step.__name__), self.assertNoLogs("remat", logging.WARNING):
                model = self.check(Net, step)
                if step not in (and_its_own, several_tasks, steps_ahead, frozen):
                    self.assertEqual(len(remat.of(model).plans), 1)

    def test_other_parameters_beside_views_of_the_first(self):
        class Views(Net):
            def begin(self):
                self.part = [self.last.bias.detach()[:8]]

            def forward(self, x):
                return super().forward(x) + self.part[0].sum()

        def step(model, x, k):
            own = {n: p.detach() * (1 + 0.1 * k) for n, p in model.named_parameters()}
            own = {n: p.requires_grad_() for n, p in own.items()}
            (torch.func.functional_call(model, own, (x,)) + model(x)).square().mean().backward()
            return [own["last.bias"].grad]

        self.check(Views, step)

    def test_meta_learning(self):
        """Second derivatives through two inner steps."""
        def step(model, x, k):
            fast = dict(model.named_parameters())
            for _ in range(2):
                loss = torch.func.functional_call(model, fast, (x,)).square().mean()
                gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), gradients)}
            torch.func.functional_call(model, fast, (x,)).square().mean().backward()

        self.check(Net, step, exact=False)

    def test_weights_of_other_steps_are_not_kept(self):
        for step in ("leaf", "made"):
            model = remat.wrap(Net(), cache=False)
            alive = []
            for _ in range(6):
                others = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
                alive.append(weakref.ref(others["first.weight"]))
                used = others if step == "leaf" else {n: 2 * p for n, p in others.items()}
                torch.func.functional_call(model, used, (torch.randn(4, 16),)).sum().backward()
                del others, used
            gc.collect()
            self.assertLessEqual(sum(r() is not None for r in alive), 1, step)

if __name__ == "__main__":
    unittest.main()
