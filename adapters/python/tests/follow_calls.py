# SPDX-License-Identifier: Apache-2.0
"""Followed steps with `torch.utils.checkpoint`, with parameters of the caller, and refusals that name the operator."""

import gc
import logging
import unittest
import warnings
import weakref

import emulated
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from following import Net, Test, backward, same


class Checkpoints(Test):
    """In eager mode, a checkpointed part runs twice, and so writes running statistics twice."""

    def test_inside(self):
        for reentrant in (False, True):
            class Recomputed(Net):
                def begin(self):
                    self.register_buffer("calls", torch.zeros(()))

                def part(self, h):
                    h = self.norm(self.drop(h)).tanh()
                    self.calls += 1  # after the last tensor that the backward needs
                    return h

                def act(self, h):
                    h = checkpoint(self.part, h, use_reentrant=reentrant).sin()
                    return checkpoint(lambda t: self.norm(t) * 2, h, use_reentrant=reentrant)

            for follow in (True,) if reentrant else (True, False):
                with self.subTest(reentrant=reentrant, follow=follow), self.assertNoLogs("remat", logging.WARNING):
                    self.check(Recomputed, follow=follow)

    def test_verified(self):
        for reentrant in (False, True):
            class Recomputed(Net):
                def act(self, h):
                    h = checkpoint(lambda t: self.drop(t).tanh(), h, use_reentrant=reentrant).sin()
                    return h + checkpoint(lambda t: self.last(t).mean(), h.detach(), use_reentrant=reentrant)

            with self.subTest(reentrant=reentrant), self.assertNoLogs("remat", logging.WARNING):
                self.check(Recomputed, verify=2)

    def test_around(self):
        def step(model, x, k):
            checkpoint(model, x, use_reentrant=False).square().mean().backward()

        def on_host(model, x, k):
            with torch.autograd.graph.save_on_cpu():
                step(model, x, k)

        for act in (step, on_host):
            with self.subTest(act.__name__), self.assertLogs("remat", logging.WARNING) as seen:
                self.check(Net, act, plans=False)
            self.assertEqual(len(seen.output), 1)

    def test_inside_of_save_on_cpu(self):
        """The plan decides what a step keeps. Steps without a plan save their tensors on the host."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks
        seen = []

        class Sees(Net):
            def act(self, h):
                seen.append(hooks(False) is not None)
                return h.tanh()

        def step(model, x, k):
            with torch.autograd.graph.save_on_cpu(pin_memory=k == 2):
                y = model(x)
                self.assertIsNotNone(hooks(False))
                y.square().mean().backward()

        for follow in (True, False):
            seen.clear()
            with torch.autograd.graph.save_on_cpu():  # the forward runs here, too
                remat.wrap(Sees(), (torch.randn(32, 16),), planner=remat.Planner(follow=follow))
            self.assertEqual(set(seen), {False})
            with self.subTest(follow=follow), self.assertNoLogs("remat", logging.WARNING):
                model = self.check(Sees, step, follow=follow)
            self.assertFalse(seen[-1])
            with remat.of(model).paused():
                step(model, torch.randn(32, 16), 0)
            self.assertTrue(seen[-1])
        with self.assertRaises(RuntimeError), torch.autograd.graph.save_on_cpu():
            model(torch.randn(32, 3))
        self.assertIsNone(hooks(False))

    def test_warnings(self):
        """Eager mode runs a reentrant part without gradients, so the inputs of parts inside need none."""
        def inner(h):
            return checkpoint(torch.tanh, h, use_reentrant=True)

        for part, told in ((inner, False), (lambda h: inner(h.sin()), True), (lambda h: h + inner(h.detach()), True)):
            class Nested(Net):
                def act(self, h):
                    return checkpoint(part, h, use_reentrant=True)

            for wrap in (lambda m: m, lambda m: remat.wrap(m, cache=False)):
                model = wrap(Nested())
                for _ in range(2):
                    with warnings.catch_warnings(record=True) as seen:
                        warnings.simplefilter("always")
                        model(torch.randn(32, 16))
                    self.assertEqual(any("None of the inputs have requires_grad" in str(w.message) for w in seen), told)


class Numbers(Test):
    """Numbers that change in each step and affect only buffers."""

    def test_planned_once(self):
        class Averages(Net):
            def begin(self):
                self.norm = nn.BatchNorm1d(48, momentum=None)
                self.steps = 0
                self.register_buffer("average", torch.zeros(48))

            def act(self, h):
                self.steps += 1
                with torch.no_grad():
                    self.average.add_(h.mean(0), alpha=1 / self.steps).lerp_(h.amax(0), 1 / (self.steps + 3))
                    torch._foreach_lerp_([self.average], [self.first.bias], 1 / (self.steps + 2))
                return h.tanh() * self.average

        with self.assertNoLogs("remat", logging.WARNING):
            model = self.check(Averages, steps=8)
        self.assertEqual(len(remat.of(model).plans), 1)

    def test_that_the_backward_uses_too(self):
        class Scales(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, buffer, scale):
                ctx.scale = scale
                buffer.add_(x.mean(0), alpha=scale)
                return x + buffer

            @staticmethod
            def backward(ctx, gradient):
                return torch.add(gradient, gradient, alpha=ctx.scale), None, None

        class Custom(Net):
            def begin(self):
                self.steps = 0
                self.register_buffer("average", torch.zeros(48))

            def act(self, h):
                self.steps += 1
                return Scales.apply(h, self.average, 1 / self.steps).tanh()

        with self.assertNoLogs("remat", logging.WARNING):
            self.check(Custom, steps=6)


class Swaps(Test):
    """Tensors of the model are swapped with other tensors while the loss of the previous step is alive."""

    def test_conversions(self):
        def swapped(model):
            torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.randn(48, 16)))

        def loaded(model):
            torch.manual_seed(5)
            model.load_state_dict(Net().state_dict())

        for change in (swapped, loaded, lambda m: m.double(), lambda m: m.to(torch.bfloat16)):
            def train(options):
                torch.manual_seed(0)
                model, found = Net(), []
                if options:
                    remat.wrap(model, cache=False, **options)
                for k in range(6):
                    loss = model(torch.randn(8, 16).to(model.first.weight.dtype)).square().mean()
                    loss.backward()
                    found += [loss.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
                    if k == 2:
                        change(model)
                        model.zero_grad()
                return found

            torch.__future__.set_swap_module_params_on_conversion(change is not swapped)
            try:
                with self.subTest(change), self.assertNoLogs("remat", logging.WARNING):
                    self.assertTrue(same(train({}), train({"budget": "100% of activations"})))
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)


class Asks(unittest.TestCase):
    def test_session_within_its_forward(self):
        """A forward that asks its own session gets an error, not a deadlock. The next steps are planned."""
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
    """on_refuse="raise": the error comes before any computation, and all state stays as it was."""

    def test_leaves_of_several_graphs(self):
        """A leaf is part of several graphs: an input that is returned, or a weight with a penalty."""
        class Returns(Net):
            def forward(self, x, y):
                h = self.act(self.first(x))
                return self.last(h + y.mean()), self.norm(h), y

        def step(model, x, k):
            y = torch.ones(32, 48, requires_grad=k != 4)
            a, b, c = model(x, y)
            used = [(a, c), (a, b), (b, c), (b, b), (a, c), (c, b)][k]
            if any(t.requires_grad for t in used):
                sum(t.square().mean() for t in (*used, model.last.weight, model.norm.weight)).backward()
            return [a, b, c, y.grad]

        self.check(Returns, step, steps=6)

    def test_numbers_of_other_paths(self):
        """A path comes back with another number than when it was recorded: the number of the previous path."""
        class Varies(Net):
            def begin(self):
                self.steps = 0

            def act(self, h):
                self.steps += 1
                h = torch.mul(h, torch.tensor(1.0 + self.steps % 2)) + torch.full((48,), float(self.steps % 5))
                return nn.functional.dropout(h * (0.5 + self.steps % 2), (0.1, 0.2, 0.3)[self.steps % 3]).tanh()

        self.check(Varies, steps=14)

    def test_gradients_after_a_refusal(self):
        """Before the refusal, a backward within the forward has run without data. No gradients of this backward remain."""
        class Learns(Net):
            learns = True

            def act(self, h):
                if self.learns:
                    self.last(h.detach()).sum().backward()
                return h.tanh()

        model = remat.wrap(Learns(), on_refuse="raise", cache=False)
        held = model.last.weight.grad = torch.ones_like(model.last.weight)
        for call in (lambda x: model(x), lambda x: remat.wrap(model, (x,), on_refuse="raise", cache=False)):
            with self.assertRaisesRegex(remat.Refused, "a backward of its own"):
                call(torch.randn(32, 16))
            self.assertIs(model.last.weight.grad, held)
            self.assertTrue(torch.equal(held, torch.ones_like(held)))
            self.assertIsNone(model.last.bias.grad)
        model.learns = False
        model(torch.randn(32, 16)).sum().backward()
        self.assertTrue(model.last.bias.grad.sum().isfinite())

    def test_named(self):
        class Sparse(Net):
            def act(self, h):
                return h + h.detach().to_sparse().to_dense()  # the line

        model, x = remat.wrap(Sparse(), on_refuse="raise", cache=False), torch.randn(8, 16)
        before, state = [b.clone() for b in model.buffers()], emulated.random_state()
        with self.assertRaises(remat.Refused) as e:
            model(x)
        self.assertEqual(e.exception.operator, "aten::_to_sparse")
        self.assertIn("# the line", e.exception.source)
        self.assertTrue(same(before, list(model.buffers())))
        self.assertTrue(torch.equal(state, emulated.random_state()))

        class Reads(Net):
            def act(self, h):
                try:
                    return h * self.norm.running_mean.numpy().std().item()
                except Exception:  # must not hide the refusal
                    return h

        model = remat.wrap(Reads(), on_refuse="raise", cache=False)
        with self.assertRaisesRegex(remat.Refused, "numpy"):
            model(x)
        self.assertTrue(same(before, list(model.buffers())))

    def test_other_parameters_in_each_call(self):
        """`torch.func.functional_call`, fast weights and replaced parameters share one plan."""
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
            """Takes the gradient of the second inner step with respect to the weights before the first inner step."""
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

        self.check(Net, step)

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
