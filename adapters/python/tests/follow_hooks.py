# SPDX-License-Identifier: Apache-2.0
"""Hooks on gradients inside of the model. A planned backward calls them."""

import contextlib
import functools
import gc
import logging
import unittest
import weakref

import torch
from torch import nn

import remat
from following import Net, Shows, Test, backward, same


def with_hook(hook, run=backward):
    """A step whose forward puts `hook` on an inner tensor. `hook` gets a gradient, and a list of results of the step."""
    def step(model, x, k):
        seen = []
        model.see = lambda h: h.register_hook(lambda g: hook(g, seen))
        run(model, x, k)
        return seen
    return step


def keep_and_halve(g, seen):
    seen.append(g)
    return g * 0.5


def second_order(g, seen):
    with torch.enable_grad():
        z = g.detach().requires_grad_()
        seen.append(torch.autograd.grad((z ** 3).sum(), z)[0])


HOOKS = {
    "looks": lambda g, seen: seen.append(torch.tensor(g.norm().item())),
    "keeps": lambda g, seen: seen.append(g),
    "keeps a view": lambda g, seen: seen.append(g[:, 3:]),
    "keeps an array": lambda g, seen: seen.append(torch.from_numpy(g.detach().cpu().numpy())),
    "replaces": lambda g, seen: g * 0.5,
    "replaces and keeps": lambda g, seen: seen.append(g * 0.5) or seen[-1],
    "writes": lambda g, seen: (g.mul_(0.5), None)[1],
    "writes and keeps": lambda g, seen: seen.append(g.mul_(0.5)),
    "writes an array": lambda g, seen: (g.numpy().__imul__(0.5) if g.is_cpu else g.mul_(0.5), None)[1],
    "draws": lambda g, seen: g + torch.randn_like(g),
    "draws a number": lambda g, seen: seen.append(torch.rand(2, device=g.device)),
    "runs a backward": second_order,
}


class Hooks(Test):
    def planned(self, make, step=backward, steps=5, **options):
        """Checks steps, none of which runs unplanned."""
        with self.assertNoLogs("remat", logging.WARNING):
            return self.check(make, step, steps, **options)

    def test_of_a_tensor(self):
        for name, hook in HOOKS.items():
            with self.subTest(name):
                self.planned(Shows, with_hook(hook))

    def test_kept_gradients_stay(self):
        """Gradients that hooks keep do not change in later steps."""
        def train(wrap):
            torch.manual_seed(0)
            model, seen = Shows(), []
            model.see = lambda h: h.register_hook(lambda g: seen.extend((g, torch.from_numpy(g.detach().cpu().numpy()))))
            if wrap:
                remat.wrap(model, budget="100% of activations", time_limit=1, cache=False)
            for _ in range(4):
                backward(model, torch.randn(32, 16), 0)
            return seen
        self.assertTrue(same(*([t.cpu() for t in train(wrap)] for wrap in (False, True))))

    def test_of_modules(self):
        """Full backward hooks and pre-hooks of inner modules, which look at gradients or replace them."""
        def add(model, seen):
            return (model.norm.register_full_backward_hook(lambda m, i, o: seen.extend((i[0].clone(), o[0]))),
                    model.last.register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,)),
                    model.first.register_full_backward_pre_hook(lambda m, o: (o[0].clamp(-1e-4, 1e-4),)),
                    model.drop.register_forward_hook(lambda m, i, o: (o.register_hook(seen.append), None)[1]))

        def step(model, x, k):
            seen = []
            handles = add(model, seen)
            backward(model, x, k)
            for handle in handles:
                handle.remove()
            return seen

        self.planned(Net, step)

    def test_of_nodes(self):
        """Hooks of `grad_fn`, before it and behind it, and several on one tensor."""
        def step(model, x, k):
            seen = []

            def see(h):
                h.register_hook(lambda g: g * 2)
                h.grad_fn.register_prehook(lambda gs: (gs[0] + 1,))
                h.grad_fn.register_hook(lambda into, out: seen.extend((into[0], out[0])))
                h.register_hook(lambda g: seen.append(g) or g * 3)
                h.retain_grad()
                seen.append(h)
            model.see = see
            backward(model, x, k)
            return [*seen[1:], seen[0].grad]

        self.planned(Shows, step)

    def test_of_several_tensors(self):
        """`register_multi_grad_hook` asks autograd which nodes the backward runs."""
        class Several(Net):
            def act(self, h):
                a, b, unused = h.tanh(), h.sigmoid(), h.exp()
                for mode in ("all", "any"):
                    torch.autograd.graph.register_multi_grad_hook((a, b, unused), functools.partial(self.see, mode), mode=mode)
                return a + b

        def step(model, x, k):
            seen = []

            def see(mode, gs):
                seen.extend(torch.zeros(()) if g is None else g for g in (gs if mode == "all" else [gs]))
            model.see = see
            backward(model, x, k)
            self.assertEqual(len(seen), 4)
            return seen

        self.planned(Several, step)

    def test_hooks_that_come_and_go(self):
        """Steps with and without hooks have plans of their own. A handle that is removed within its hook, and a hook that adds one."""
        def now_and_then(model, x, k):
            seen = []
            model.see = (lambda h: h.register_hook(seen.append)) if k % 3 == 1 else None
            backward(model, x, k)
            return seen

        def once(model, x, k):
            seen, handles = [], []

            def hook(g):
                seen.append(g)
                handles[0].remove()
            model.see = lambda h: handles.append(h.register_hook(hook)) or handles.append(h.register_hook(seen.append))
            backward(model, x, k)
            return seen

        self.check(Shows, now_and_then, 8)
        self.planned(Shows, once)

    def test_after_the_forward(self):
        """Hooks on tensors that the model has kept, and gradients that these retain. Other outputs depend on them."""
        def step(model, x, k):
            held, seen = [], []
            model.see = held.append
            y = model(x)
            model.see = None
            held[0].retain_grad()
            held[0].register_hook(lambda g: seen.append(g) or g * 2)
            y.square().mean().backward()
            return [held[0].grad, *seen]

        self.check(Shows, step)

    def test_one_gradient_for_two(self):
        """The gradient of a sum goes to both addends. A hook of one does not change the other."""
        class Sum(Net):
            def act(self, h):
                a, b = h.tanh(), h.sigmoid()
                a.register_hook(lambda g: g.mul(0.5))
                return a + b

        class Joined(Net):
            def begin(self):
                self.last = nn.Linear(96, 16)

            def act(self, h):
                a, b = h.tanh(), h.sigmoid()
                a.register_hook(lambda g: None)
                return torch.cat([a, b], 1)

        self.planned(Sum)
        self.planned(Joined)

    def test_other_layouts(self):
        """Hooks that return gradients with other strides, or of expanded ones. These steps leave the plan. Hooks run once per step."""
        class Summed(Net):
            def act(self, h):
                a = h.tanh()
                self.see(a)
                return h + 0.01 * a.sum(1, keepdim=True)

        hooks = {"turned": lambda g: (g * 0.5).t().contiguous().t(), "dense": lambda g: g * 0.5, "none": lambda g: None}
        for make in (Shows, Summed):
            for name, hook in hooks.items():
                def step(model, x, k, hook=hook):
                    seen = []
                    model.see = lambda h: h.register_hook(lambda g: (seen.append(g.clone()), hook(g))[1])
                    backward(model, x, k)
                    self.assertEqual(len(seen), 1)
                    return seen
                with self.subTest(make=make.__name__, hook=name):
                    leaves = (name == "turned") or (make is Summed and name == "dense")
                    with self.assertLogs("remat", logging.WARNING) if leaves else self.assertNoLogs("remat", logging.WARNING) as told:
                        self.check(make, step)
                    if leaves:
                        self.assertIn("another memory layout", told.output[0])

    def test_graph_of_gradients(self):
        def step(model, x, k):
            seen = []
            model.see = lambda h: h.register_hook(lambda g: seen.append(g.detach().clone()) or g * 0.5)
            x.requires_grad_()
            loss = model(x).square().mean()
            (loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()).backward()
            return seen

        self.check(Shows, step, plans=None)

    def test_a_second_backward(self):
        def twice(model, x, k):
            y = model(x).square()
            y.mean().backward(retain_graph=True)
            y.sum().backward()

        self.check(Shows, with_hook(keep_and_halve, twice), plans=None)

    def test_an_error_in_a_hook(self):
        def step(model, x, k):
            seen = []

            def hook(g):
                seen.append(g)
                if k % 2:
                    raise ValueError("a hook")
            model.see = lambda h: h.register_hook(hook)
            with self.assertRaisesRegex(ValueError, "a hook") if k % 2 else contextlib.nullcontext():
                backward(model, x, k)
            if k % 2:
                model.zero_grad()  # plain PyTorch has accumulated some gradients before the error
            return seen

        self.planned(Shows, step)

    def test_a_hook_that_writes_what_the_backward_reads(self):
        """Plain PyTorch raises an error, too."""
        for wrap in (False, True):
            with self.subTest(wrap=wrap):
                model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()), torch.randn(8, 16, requires_grad=True)

                def hook(g, model=model):
                    with torch.no_grad():
                        model[0].weight.mul_(2)
                model[1].register_forward_hook(lambda m, i, o, hook=hook: (o.register_hook(hook), None)[1])
                if wrap:
                    remat.wrap(model, budget="100% of activations", time_limit=1, cache=False)
                with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                    model(x).sum().backward()

    def test_gradients_of_parameters(self):
        """Hooks see in `.grad` what is complete in plain PyTorch: nothing, a gradient, or a sum. They may change it."""
        def look(model, seen):
            seen.extend(torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters())

        def looks(model, x, k):
            seen = []
            model.see = lambda h: h.register_hook(lambda g: look(model, seen))
            handle = model.first.register_full_backward_hook(lambda m, i, o: look(model, seen))
            for part in x.requires_grad_().chunk(1 + k % 2):
                backward(model, part, k)
            handle.remove()
            return seen

        def changes(model, x, k):
            def hook(g):
                model.last.weight.grad.mul_(0.5)
                model.last.bias.grad = None
            model.see = lambda h: h.register_hook(hook)
            backward(model, x, k)

        def leaves(model, x, k):
            seen = []
            model.see = lambda h: h.register_hook(lambda g: look(model, seen) or (g * 0.5).t().contiguous().t())
            for part in x.chunk(2):
                backward(model, part, k)
            return seen

        self.planned(Shows, looks, 6)
        self.planned(Shows, changes)
        self.check(Shows, leaves, plans=None)

    def test_micro_batches(self):
        def batches(model, x, k):
            for part in x.chunk(2):
                backward(model, part, k)

        self.planned(Shows, with_hook(keep_and_halve, batches))

    def test_casts(self):
        def cast(model, x, k):
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()

        self.planned(Shows, with_hook(keep_and_halve, cast))

    def test_loss_inside(self):
        """The loss is inside of the model, some outputs are not used, and a tensor of the model's state retains its gradient."""
        class Losses(Shows):
            def forward(self, x):
                y = super().forward(x)
                return y.square().mean(), y, self.kept

            def act(self, h):
                self.kept = super().act(h)
                self.kept.retain_grad()
                return self.kept

        def step(model, x, k):
            model(x)[0].backward()
            return [model.kept.grad]

        self.planned(Losses, step)

    def test_memory_within_a_budget(self):
        """Hooks that look at gradients take no memory of a gradient."""
        def smallest(hook):
            torch.manual_seed(0)
            model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())))
            if hook:
                for m in model:
                    m.register_forward_hook(lambda m, i, o: (o.register_hook(lambda g: None), None)[1])
            remat.wrap(model, budget="10% of activations", time_limit=1, cache=False)
            try:
                backward(model, torch.randn(1024, 64), 0)
            except remat.OverBudget as e:
                return e.needed
            raise AssertionError("the budget suffices")
        self.assertLess(smallest(True), smallest(False) + 1024 * 64 * 4)

    def test_a_hook_that_trains_another_model(self):
        """The other model has plans and hooks of its own."""
        def trained(wrap):
            torch.manual_seed(0)
            first, second, seen = Shows(), Shows(), []
            second.see = lambda h: h.register_hook(lambda g: keep_and_halve(g, seen))

            def train_second(g):
                with torch.enable_grad():
                    second(x + 1).sum().backward()
                return g * 2
            first.see = lambda h: h.register_hook(train_second)
            if wrap:
                for model in (first, second):
                    remat.wrap(model, budget="100% of activations", time_limit=1, cache=False)
            for _ in range(4):
                x = torch.randn(32, 16)
                backward(first, x, 0)
            return [t.cpu() for t in (*seen, *(p.grad for model in (first, second) for p in model.parameters()))]
        self.assertTrue(same(trained(False), trained(True)))

    def test_verified(self):
        """Gradients are not compared, as hooks would be called twice."""
        model, seen = Shows(), []
        model.see = lambda h: h.register_hook(seen.append)
        remat.wrap(model, budget="100% of activations", planner=remat.Planner(time_limit=1, verify=2), cache=False)
        with self.assertLogs("remat", logging.WARNING) as told:
            for _ in range(3):
                backward(model, torch.randn(32, 16), 0)
        self.assertEqual(len(seen), 3)
        self.assertIn("gradients of this step are not compared", " ".join(told.output))

    def test_no_leak(self):
        """Hooks, and what they hold, die with the step."""
        told, model = [], Shows()

        def see(h):
            hook = functools.partial(lambda g: None)
            told.append(weakref.ref(hook))
            h.register_hook(hook)
        model.see = see
        remat.wrap(model, budget="100% of activations", time_limit=1, cache=False)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                backward(model, torch.randn(32, 16), 0)
            self.assertEqual([t() for t in told], [None] * 3)
        finally:
            gc.enable()


if __name__ == "__main__":
    unittest.main()
