# SPDX-License-Identifier: Apache-2.0
"""Training loops give equal results with plain and wrapped models, bit by bit."""

import collections
import copy
import gc
import itertools
import os
import resource
import unittest
import unittest.mock

import emulated
import torch
from torch import nn

import remat
from compare import copied, same
from wrapping import Chain, inputs


class Loops(unittest.TestCase):
    """Actions of training loops."""

    def both(self, act, make=Chain, budget=None):
        found = []
        for wrapped in (False, True):
            torch.manual_seed(0)
            m = make()
            if wrapped:
                remat.wrap(m, budget=budget, time_limit=5)
            found.append([copied(act(m)), copied(dict(m.state_dict())), emulated.random_state()])
        self.assertTrue(same(*found))
        return m

    def test_accumulation_and_clipping(self):
        def act(m):
            optimizer = torch.optim.AdamW(m.parameters(), 1e-2)
            for i, ((x,), _) in enumerate(inputs(6)):
                m(x).square().mean().backward()
                if i % 2:
                    norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=i < 3)
            return [norm]

        self.both(act)
        self.both(act, budget="200% of activations")

    def test_an_arena_is_kept(self):
        """Later steps share one arena, so each of its pages faults only once. If gradients are kept, they stay in the arena of the first
        step, and the budget counts this arena."""
        for to_none, batches, functional in ((False, (8,), False), (True, (8, 6), False), (False, (8, 6), False), (True, (8,), True)):
            m = remat.wrap(nn.Sequential(*[layer for _ in range(300) for layer in (nn.Linear(64, 64), nn.ReLU())]), budget="100%")
            faults = []
            for k in range(12):
                x = torch.randn(batches[k % len(batches)], 64)
                m.zero_grad(set_to_none=to_none)
                weights = dict(m.named_parameters())
                if functional:
                    weights = {name: p.detach().clone().requires_grad_() for name, p in weights.items()}
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                torch.func.functional_call(m, weights, x).square().mean().backward()
                faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            pages = remat.of(m).memory()["arena"] // resource.getpagesize()
            self.assertGreater(pages, 50)  # otherwise page faults would not tell: a huge page faults once
            self.assertLess(sum(faults[6:]), 2 * pages, (to_none, batches, functional))

    def test_gradients_in_arenas_are_reported(self):
        m = remat.wrap(nn.Sequential(*[layer for _ in range(30) for layer in (nn.Linear(64, 64), nn.ReLU())]))
        for k in range(3):
            m(torch.randn(8, 64)).square().mean().backward()
        told = {row[:28].strip(): row[28:] for row in remat.of(m).report().splitlines()}
        self.assertNotEqual(told["gradients of before"], "0 B")

    def test_several_forwards_before_the_backwards(self):
        def act(m):
            found = []
            for (x,), _ in inputs():
                a, b, c = m(x), m(x + 1), m(x[:100])
                (a.sum() * b.square().sum() + c.sum()).backward()
                found.append(copied([a, b, c, [p.grad for p in m.parameters()]]))
            return found

        for budget in (None, "100% of activations", "90% of activations"):  # in % of the memory of all three calls
            self.both(act, budget=budget)

    def test_losses_that_lay_gradients_out_differently(self):
        """The gradient of a sum is one expanded number; other losses give columns or parts. Kernels may add these in another order."""
        losses = [torch.sum, torch.mean, lambda y: y.sum(0).square().sum(), lambda y: y.sum(1).square().sum(), lambda y: (y.t() @ y).mean(),
                  lambda y: y[:, ::2].sum(), lambda y: y.sum() * 0.1]

        for last in (nn.BatchNorm1d(32), nn.Linear(32, 32), nn.LayerNorm(32), nn.GroupNorm(4, 32)):
            def make():
                return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), copy.deepcopy(last))

            for order in (losses, [losses[0]] * 3 + losses[::-1]):
                def act(m):
                    found = []
                    for loss, ((x,), _) in zip(order, inputs(len(order))):
                        m.zero_grad()
                        loss(m(x)).backward()
                        found.append(copied([p.grad for p in m.parameters()]))
                    return found

                self.both(act, make=make)

    def test_accumulation_beside_other_graphs(self):
        """Gradients of a parameter from several graphs are summed first, and then added to the existing gradient."""
        def act(m):
            found = []
            for i, ((x,), _) in enumerate(inputs(8)):
                y = m(x)
                if i % 4 == 1:
                    loss = y.square().mean() + sum(p.square().sum() for p in m.parameters()) + m.layers[0].bias.sum()
                elif i % 4 == 2:
                    loss = y.mean() + m(x + 1).square().mean() + m(x + 2).square().mean()
                else:
                    loss = (y + m.layers[0].bias).square().mean()
                loss.backward()
                found.append(copied([p.grad for p in m.parameters()]))
                if i == 4:
                    m.zero_grad()
            return found

        for budget in (None, "90% of activations"):
            self.both(act, budget=budget)

    def test_module_changes_between_forward_and_backward(self):
        """A change of the module between forward and backward has no effect, even if an unexpected loss makes the forward run once more."""
        class Two(Chain):
            def forward(self, x):
                y = super().forward(x)
                return y * 2, y.mean(-1)

        def other(m):
            m.eval()

        def scaled(m):
            m.scale = 3.0

        def replaced(m):
            m.layers[0].weight = nn.Parameter(m.layers[0].weight.detach() * 2)

        def nothing(m):
            pass

        for change in (nothing, other, scaled, replaced):
            for loss in (lambda y: y[0].square().mean(), lambda y: y[1].sum(), lambda y: y[0].sum() + y[1].mean()):
                def act(m):
                    parameters = list(m.parameters())
                    y = m(inputs()[0][0][0])
                    change(m)
                    loss(y).backward()
                    m.train()
                    found = copied([p.grad for p in parameters])
                    loss(m(inputs()[1][0][0])).backward()
                    return [found, [p.grad for p in m.parameters()]]

                self.both(act, make=Two)

    def test_losses_that_change_while_steps_are_in_flight(self):
        class Two(Chain):
            def forward(self, x):
                y = super().forward(x)
                return y * 2, y.mean(-1)

        losses = [lambda y: y[0].sum(), lambda y: y[0].square().mean(), lambda y: y[1].sum(), lambda y: y[0].sum(-1).abs().sum() + y[1].max()]
        for before, first, second in itertools.product(losses, repeat=3):
            def act(m):
                before(m(inputs()[0][0][0])).backward()
                a, b = m(inputs()[1][0][0]), m(inputs()[2][0][0])
                first(a).backward()
                found = copied([p.grad for p in m.parameters()])
                second(b).backward()
                return [found, [p.grad for p in m.parameters()]]

            self.both(act, make=Two)

    def test_hooks_of_outputs(self):
        """Hooks of outputs that the loss does not use are not called."""
        class Two(Chain):
            def forward(self, x):
                y = super().forward(x)
                return y * 2, y.mean(-1)

        def act(m):
            seen = []
            for (x,), _ in inputs():
                a, b = m(x)
                a.register_hook(lambda g: seen.append(copied(g)))
                b.register_hook(lambda g: g * 2)
                b.retain_grad()
                b.square().sum().backward()
                seen.append(b.grad)
            return [seen, [p.grad for p in m.parameters()]]

        self.both(act, make=Two)

    def test_functional_call_of_several_outputs(self):
        class Two(Chain):
            def forward(self, x):
                y = super().forward(x)
                return y * 2, y.mean(-1)

        def act(m):
            found = []
            for (x,), _ in inputs():
                other = {k: (v.detach() * 2).requires_grad_() for k, v in m.named_parameters()}
                torch.func.functional_call(m, other, (x,))[0].square().mean().backward()
                found.append([v.grad for v in other.values()])
                m(x)[1].square().mean().backward()
            return [found, [p.grad for p in m.parameters()]]

        self.both(act, make=Two)

    def test_forward_without_backward(self):
        def act(m):
            for (x,), _ in inputs(4):
                m(x)
            m(x).sum().backward()
            return [p.grad for p in m.parameters()]

        self.both(act)

    def test_evaluation_between_steps(self):
        def act(m):
            found = []
            for (x,), _ in inputs(4):
                m(x).sum().backward()
                with torch.no_grad():
                    found.append(m(x))
                m.eval()
                found.append(m(x))
                with torch.inference_mode():
                    found.append(m(x).clone())
                m.train()
            return [found, [p.grad for p in m.parameters()]]

        self.both(act)

    def test_autograd_grad(self):
        def act(m):
            (x,), _ = inputs()[0]
            some = [m.layers[0].weight, m.norm.bias]
            return [torch.autograd.grad(m(x).sum(), some), [p.grad for p in m.parameters()]]

        self.both(act)

    def test_functional_call(self):
        def act(m):
            (x,), _ = inputs()[0]
            other = {k: (v.detach() * 2).requires_grad_() for k, v in m.named_parameters()}
            y = torch.func.functional_call(m, other, (x,))
            y.sum().backward()
            m(x).sum().backward()
            made = {k: v * 3 for k, v in m.named_parameters()}
            torch.func.functional_call(m, made, (x,)).sum().backward()
            return [y, [v.grad for v in other.values()], [p.grad for p in m.parameters()]]

        self.both(act)

    def test_load_state(self):
        def act(m):
            found = []
            for assign in (False, True):
                state = {k: v.clone() + 0.01 for k, v in m.state_dict().items()}
                m.load_state_dict(state, assign=assign)
                for (x,), _ in inputs(2):
                    y = m(x)
                    y.sum().backward()
                    found.append([y, [p.grad for p in m.parameters()]])
                    m.zero_grad()
            return found

        self.both(act)

    def test_hooks_of_the_root_and_of_parameters(self):
        def act(m):
            calls = collections.Counter()

            def scaled(module, args, output):
                calls["forward"] += 1
                return output * 2

            m.register_forward_hook(scaled)
            m.register_forward_pre_hook(lambda module, args: calls.update(["before"]))
            m.register_full_backward_hook(lambda module, gi, go: calls.update(["backward"]))
            m.layers[0].weight.register_hook(lambda g: calls.update(["gradient"]) or g * 3)
            m.layers[1].weight.register_post_accumulate_grad_hook(lambda p: calls.update(["accumulated"]))
            for (x,), _ in inputs():
                m(x).sum().backward()
            return [dict(sorted(calls.items())), [p.grad for p in m.parameters()]]

        self.both(act)

    def test_exceptions_pass(self):
        class Wrong(Exception):
            pass

        class Net(Chain):
            fail = None

            def forward(self, x):
                y = super().forward(x)
                if self.fail:
                    raise self.fail
                return y

        def act(m):
            (x,), _ = inputs()[0]
            error = Wrong("this one")
            m.fail = error
            try:
                m(x)
            except Wrong as e:
                assert e is error
                assert "forward" in [f.name for f in __import__("traceback").extract_tb(e.__traceback__)]
            torch.manual_seed(5)
            m.load_state_dict(Chain().state_dict())
            m.fail = None
            y = m(x)
            y.sum().backward()
            with self.assertRaises(RuntimeError):
                m(torch.randn(3, 5))
            m.zero_grad()
            torch.manual_seed(5)
            m.load_state_dict(Chain().state_dict())
            m(x).sum().backward()
            return [y, [p.grad for p in m.parameters()]]

        self.both(act, Net)

    @unittest.skipUnless(emulated.on_host, "a forked process has no device")
    def test_precision_of_products(self):
        """PyTorch's new settings of precision. After their use, reading the older settings is an error in PyTorch."""
        def trains():
            model, (x,) = Chain(), inputs()[0][0]
            plain = copy.deepcopy(model)
            for m in (remat.wrap(model, budget="90% of activations", cache=False, planner=remat.Planner(time_limit=1)), plain):
                torch.manual_seed(0)
                m(x).square().mean().backward()
            remat.plan(plain, (x,), device="h100-sxm", time_limit=1)
            return all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters()))

        for setting in ("cuda.matmul.fp32_precision='tf32'", "fp32_precision='tf32'", "fp32_precision='ieee'", "mkldnn.matmul.fp32_precision='bf16'",
                        "cudnn.conv.fp32_precision='ieee'", "cudnn.fp32_precision='ieee'"):
            with self.subTest(setting):
                child = os.fork()  # in a child process, because the settings cannot be undone
                if child == 0:
                    try:
                        exec(f"torch.backends.{setting}")
                        os._exit(0 if trains() else 1)
                    finally:
                        os._exit(2)
                self.assertEqual(os.waitpid(child, 0)[1], 0)

    def test_thousand_steps(self):
        m = remat.wrap(Chain(depth=2), budget="300% of activations", time_limit=2)
        (x,), _ = inputs(1, 128)[0]

        def steps(n):
            for i in range(n):
                y = m(x)
                if i % 3:
                    y.sum().backward()
                if i % 7 == 0:
                    with torch.no_grad():
                        m(x)
                if i % 5 == 0:
                    m.zero_grad()
            del y
            m.zero_grad()
            remat.of(m).release()
            gc.collect()
            return len(gc.get_objects()), remat.of(m).memory()["live"]

        steps(105)
        objects, live = steps(105)
        now, after = steps(1050)
        self.assertLess(now - objects, 50)
        self.assertEqual(after, live)


if __name__ == "__main__":
    unittest.main()
