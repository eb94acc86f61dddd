# SPDX-License-Identifier: Apache-2.0
"""Inputs that unplanned code has computed from weights. Forwards return such inputs, or write to them."""

import gc
import unittest
import weakref

import torch
from torch import nn

import remat
from following import Net, Test


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].exp()


class Told:
    """A hook that does nothing."""

    def __call__(self, gradient):
        pass


class Head(Net):
    """A wrapped model behind a layer that is not planned."""

    def __init__(self):
        super().__init__()
        self.__dict__["before"] = nn.Linear(16, 16)  # not a submodule, so not part of the wrapped model

    def grads(self):
        return [p.grad for p in self.before.parameters()]


class Returns(Head):
    def forward(self, x):
        return super().forward(x), x


class ReturnsBehindFunction(Returns):
    def act(self, h):
        return Exp.apply(h.tanh())


def writes(how):
    class Writes(Head):
        def forward(self, x):
            how(x, self.last(self.first(x.detach().sin())).sigmoid())
            return super().forward(x)

    return Writes


#: how a forward writes to its input x; g: a tensor that the forward has computed from weights
WRITES = {
    "relu_": lambda x, g: x.relu_(),
    "sigmoid_": lambda x, g: x.sigmoid_(),
    "add_": lambda x, g: x.add_(g),
    "mul_": lambda x, g: x.mul_(g.detach()),
    "copy_": lambda x, g: x.copy_(g),
    "of a part": lambda x, g: x[:, :4].mul_(g[:, :4].detach()),
}


def plain(loss, model):
    loss.backward()


def twice(loss, model):
    loss.backward(retain_graph=True)
    loss.backward()


def second_order(loss, model):
    leaves = [*model.parameters(), *model.before.parameters()]
    found = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    (0.001 * sum(g.square().sum() for g in found if g is not None)).backward()


class Inputs(Test):
    def step(self, backward, uses_input, returned=False):
        def step(model, x, k):
            model.before.zero_grad()
            h = model.before(x) * 1
            y = model(h)
            y, same = y if returned else (y, h)
            self.assertTrue(same is h)
            backward(y.square().mean() + (same.sin().mean() if uses_input else 0), model)
            return [*model.grads(), h]

        return step

    def test_inputs_that_are_returned(self):
        for kind in (Returns, ReturnsBehindFunction):
            for backward in (plain, twice, second_order):
                for uses in (False, True):
                    with self.subTest(kind=kind.__name__, backward=backward.__name__, uses=uses):
                        self.check(kind, self.step(backward, uses, True))

    def test_a_returned_input_of_another_planned_module(self):
        class Pair(Head):
            def __init__(self):
                super().__init__()
                self.__dict__["head"] = Returns()

        def step(model, x, k):
            model.head.zero_grad()
            if remat.is_wrapped(model) and k == 0:
                remat.wrap(model.head, budget="100% of activations", cache=False)
            y, h = model.head(model(x))
            (y.square().mean() + h.square().mean()).backward()
            return [p.grad for p in model.head.parameters()]

        self.check(Pair, step)

    def test_a_forward_that_only_returns_its_input_at_first(self):
        class Skips(Head):
            def begin(self):
                self.calls = 0

            def forward(self, x):
                self.calls += 1
                return x if self.calls % 3 == 1 else super().forward(x)

        model = self.check(Skips, self.step(plain, False), steps=6)
        self.assertGreaterEqual(len(remat.of(model).plans), 2)

    def test_a_gradient_of_a_returned_input(self):
        """The gradient sums over all uses of the input, inside and outside of the forward."""
        def step(model, x, k):
            h = model.before(x)
            y, same = model(h)
            found, = torch.autograd.grad(y.square().mean() + same.square().mean(), [h], retain_graph=True)
            y.sum().backward()
            return [found]

        self.check(Returns, step)

    def test_inputs_that_are_written(self):
        for name, how in WRITES.items():
            for backward in (plain, twice):
                for uses in (False, True):
                    for verify in (0, 2) if backward is plain else (0,):
                        with self.subTest(write=name, backward=backward.__name__, uses=uses, verify=verify):
                            self.check(writes(how), self.step(backward, uses), verify=verify)

    def test_written_inputs_are_planned(self):
        for name, how in WRITES.items():
            with self.subTest(write=name):
                model = self.check(writes(how), self.step(plain, False))
                self.assertGreater(remat.of(model).plan["operations"], 0)

    def test_a_written_view_runs_as_it_is(self):
        def step(model, x, k):
            model.before.zero_grad()
            h = model.before(x).unsqueeze(0)
            model(h[0]).square().mean().backward()
            return model.grads()

        self.check(writes(WRITES["mul_"]), step, plans=False)

    def test_an_input_that_needs_a_gradient_since_it_was_written(self):
        def step(model, x, k):
            h = x.clone()
            y = model(h)
            (y.square().mean() + h.sin().mean()).backward()

        self.check(writes(WRITES["copy_"]), step)

    def test_a_dropped_step_is_gone(self):
        for kind, returned in ((Returns, True), (writes(WRITES["mul_"]), False)):
            with self.subTest(kind=kind.__name__):
                model = self.check(kind, self.step(plain, True, returned), steps=2)
                gc.collect()
                gc.disable()
                try:
                    h = model.before(torch.randn(32, 16)) * 1
                    told = Told()
                    h.register_hook(told)
                    told = weakref.ref(told)
                    y = model(h)
                    del h, y
                    model(torch.randn(32, 16))
                    self.assertIsNone(told())
                finally:
                    gc.enable()


if __name__ == "__main__":
    unittest.main()
