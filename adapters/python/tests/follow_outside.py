# SPDX-License-Identifier: Apache-2.0
"""Followed steps with inputs from outside: tensors with a graph of their own, numbers of other generators, memory that operators read."""

import logging
import pickle
import unittest

import torch
import torch.nn.functional as F
from torch import default_generator, nn
from torch.overrides import TorchFunctionMode

import remat
from following import Net, Test, backward


class Taking(Net):
    """A model that uses tensors from an attribute, which the test sets."""

    def begin(self):
        self.taken = []

    def act(self, h):
        h = h.tanh()
        for t in self.taken:
            h = h * 1.01 + t.mean() * h.mean()
        return h


class Trained(Test):
    """Tensors that require a gradient, but are neither parameters nor arguments. The gradient flows on to their own graph."""

    def check_planned(self, make, step, plans=1, **options):
        with self.assertNoLogs("remat", logging.WARNING):
            model = self.check(make, step, steps=6, budget="90%", **options)
        self.assertEqual(len(remat.of(model).plans), plans)

    def test_made_of_other_weights(self):
        def step(model, x, k):
            torch.manual_seed(k)
            other = nn.Linear(4, 16)
            made = other(torch.randn(3, 4)).tanh()
            model.taken = [made, made[:, :3] * 2]
            (model(x).square().mean() + made.mean()).backward()
            return [other.weight.grad, other.bias.grad]

        self.check_planned(Taking, step)

    def test_leaves(self):
        def step(model, x, k):
            leaf = nn.Parameter(torch.full((16,), 1.0 + k))
            frozen = nn.Parameter(torch.ones(16), requires_grad=False)
            model.taken = [leaf, frozen]
            model(x).square().mean().backward()
            return [leaf.grad, frozen.grad]

        self.check_planned(Taking, step)

    def test_views_of_one_tensor(self):
        """Several views of one tensor, of which one is an argument. The gradients of the other views do not flow into the argument."""
        def step(model, x, k):
            leaf = nn.Parameter(torch.cat([x, x + 1, x + 2]))
            first, second, third = (leaf * 2).chunk(3)
            model.taken = [second, third]
            model(first).square().mean().backward()
            return [leaf.grad]

        self.check_planned(Taking, step)

        def beside(model, x, k):
            leaf = nn.Parameter(torch.cat([x, x + 1]))
            whole = leaf * 2
            model.taken = [whole[:32], whole[32:]]
            model(x).square().mean().backward()
            return [leaf.grad]

        self.check_planned(Taking, beside)

    def test_in_turns(self):
        """The number of tensors, and their requires_grad, change from step to step."""
        def step(model, x, k):
            leaf = nn.Parameter(torch.ones(16), requires_grad=k % 3 != 1)
            model.taken = [leaf] * (k % 2 + 1)
            model(x).square().mean().backward()
            return [leaf.grad]

        self.check(Taking, step, steps=9)

    def test_kept_by_the_module(self):
        """The module keeps a state with its graph from one call to the next."""
        class Keeping(Net):
            def act(self, h):
                h = h.tanh() if self.state is None else (h + self.state.mean(0)).tanh()
                self.state = h
                return h

        def step(model, x, k):
            model.state = None
            sum(model(x + i).square().mean() for i in range(3)).backward()
            return [model.state]

        with self.assertNoLogs("remat", logging.WARNING):
            self.check(Keeping, step, steps=6)

    def test_weights_that_two_calls_share(self):
        """The first call computes the weights, and the second call takes them from a cache."""
        def make():
            model = Net()
            nn.utils.parametrizations.weight_norm(model.first)
            return model

        def step(model, x, k):
            with nn.utils.parametrize.cached():
                y = model(x) + model(x + 1)
            y.square().mean().backward()
            return [y]

        for budget in ("100%", "95%"):
            with self.subTest(budget=budget):
                self.check(make, step, steps=6, budget=budget)

    def test_written(self):
        """A step that writes to such a tensor runs unplanned."""
        class Writing(Taking):
            def act(self, h):
                self.taken[0].mul_(2)
                return super().act(h)

        def step(model, x, k):
            leaf = nn.Parameter(torch.ones(16))
            model.taken = [leaf * 3]
            model(x).square().mean().backward()
            return [leaf.grad]

        with self.assertLogs("remat", logging.WARNING) as seen:
            self.check(Writing, step, plans=False)
        self.assertIn("writes a tensor that requires a gradient", seen.output[0])


class Written(Test):
    """Tensors that the loop writes before the backward, which in eager mode does not need them."""

    def test_before_another_use_of_the_outputs(self):
        """A forward that runs once more would read them."""
        class Shifted(Net):
            def begin(self):
                self.register_buffer("shift", torch.ones(48))
                self.more = [torch.ones(48)]

            def forward(self, x):
                h = (self.first(x) + self.shift + self.more[0]).tanh()
                return self.last(h), h

        def step(written, loss):
            def act(model, x, k):
                outputs = model(x)
                written(model).mul_(0.5)
                loss(outputs, k).backward()
            return act

        for written in (lambda m: m.shift, lambda m: m.more[0], lambda m: m.first.bias.detach()):
            self.check(Shifted, step(written, lambda outputs, k: outputs[0].square().mean()))
            with self.assertRaisesRegex(RuntimeError, "another tensor that it reads was modified"):
                self.check(Shifted, step(written, lambda outputs, k: outputs[k % 2].sum()))


class Generators(Test):
    """The user's generators advance as in eager mode. Their numbers are inputs of the plan."""

    def test_draws(self):
        class Drawing(Net):
            def begin(self):
                self.own = torch.Generator().manual_seed(3)

            def act(self, h):
                h = h.tanh() + torch.randn(48, generator=self.own) * torch.randint(3, (48,), generator=self.own)
                h = h * (torch.rand(h.shape, generator=self.own) > 0.1)
                chosen = torch.multinomial(h.detach().softmax(1), 2, generator=self.own)
                return h.tanh()[torch.randperm(32, generator=self.own)] + chosen.sum() * 0.01

        def step(model, x, k):
            if k == 3:
                model.own.manual_seed(9)
            model(x).square().mean().backward()
            return [model.own.get_state()]

        with self.assertNoLogs("remat", logging.WARNING):
            model = self.check(Drawing, step, steps=6, budget="90%")
        self.assertEqual(len(remat.of(model).plans), 1)

    def test_states_of_the_default_generator(self):
        def again(g):
            state, drawn = g.get_state(), torch.rand(48)
            g.set_state(state)
            return drawn - torch.rand(48)

        def seeded(g):
            g.manual_seed(7)
            return torch.rand(48) * (g.initial_seed() % 1000)

        found = {
            "state": lambda g: g.get_state()[:48] / 256, "seed": lambda g: g.initial_seed() % 1000 / 1000, "again": again, "seeded": seeded,
            "copy": lambda g: torch.rand(48, generator=g.clone_state()), "pickle": lambda g: pickle.loads(pickle.dumps(g)).get_state()[:48] / 256}
        for name, look in found.items():
            class Looks(Net):
                def act(self, h):
                    return self.drop(h) + look(default_generator) + torch.rand(48)

            with self.subTest(name):
                self.check(Looks, plans=False)

    def test_draws_that_are_not_planned(self):
        def in_place(self, h):
            return h + torch.empty(48).normal_(generator=self.own)

        def of_activations(self, h):
            return h * torch.bernoulli(h.sigmoid(), generator=self.own)

        def begin(self):
            self.own = torch.Generator().manual_seed(3)

        def step(model, x, k):
            backward(model, x, k)
            return [model.own.get_state()]

        for act in (in_place, of_activations):
            with self.subTest(act.__name__), self.assertLogs("remat", logging.WARNING) as seen:
                self.check(type("Drawing", (Net,), {"act": act, "begin": begin}), step, plans=False)
            self.assertIn("from a generator other than the default one", seen.output[0])

        def drawing(self, h):
            return h + torch.rand(48, generator=self.own)

        with self.assertLogs("remat", logging.WARNING) as seen:
            self.check(type("Drawing", (Net,), {"act": drawing, "begin": begin}), step, verify=2, plans=False)
        self.assertIn("the step will run once more", seen.output[0])


class Readers(Test):
    """Composite operators whose C++ code reads memory between their inner operators."""

    def test_planned(self):
        packed = nn.utils.rnn.pack_padded_sequence

        def pad(sequences):
            return nn.utils.rnn.pad_packed_sequence(sequences, batch_first=True, total_length=8)

        def recurrent(kind, changes):
            class Packed(Net):
                def begin(self):
                    self.cell = kind(48, 48, 2, batch_first=True, dropout=0.1)
                    self.step = 0

                def act(self, h):
                    self.step += 1
                    lengths = torch.tensor([8, 3, 5, 2]) + (self.step % 2 if changes else 0)
                    y = packed(h.view(4, 8, 48), lengths.clamp(max=8), batch_first=True, enforce_sorted=False)
                    y = packed(pad(self.cell(y)[0])[0].relu(), [8, 7, 4, 2], batch_first=True)
                    return pad(y)[0].flatten(0, 1)

            return Packed

        def splitting(self, h):
            return sum(part.sum(0) for part in torch.tensor_split(h, (h.detach()[0] > 9).cumsum(0)[:3] + torch.tensor([3, 9, 20]))) + h

        def pooling(self, h):
            return h.tanh() * F.max_pool1d(h.detach()[None], 3, 1, 1)[0]

        makes = [*(recurrent(kind, changes) for kind in (nn.GRU, nn.LSTM, nn.RNN) for changes in (False, True)), type("Splitting", (Net,), {"act": splitting}), type("Pooling", (Net,), {"act": pooling})]
        for make in makes:
            with self.subTest(make.__name__), self.assertNoLogs("remat", logging.WARNING):
                model = self.check(make, budget="100%")
            self.assertTrue(remat.of(model).plans)

    def test_not_planned(self):
        def quantile(self, h):
            return h - torch.quantile(h, torch.tensor([0.2, 0.7]), dim=1).sum(0)[:, None]

        with self.assertLogs("remat", logging.WARNING) as seen:
            self.check(type("Reading", (Net,), {"act": quantile}), plans=False)
        self.assertEqual(len(seen.output), 1)

    def test_nothing(self):
        """PyTorch treats tensors without elements as contiguous, whatever their strides."""
        def gaps(self, h):
            nothing = torch.complex(h, h)[:0].imag
            return h.tanh() + (nothing * nothing).sum() + torch.cat([nothing * 2, nothing]).sum()

        with self.assertNoLogs("remat", logging.WARNING):
            self.check(type("Reading", (Net,), {"act": gaps}))

    def test_lengths(self):
        """CTC loss has a table whose size depends on the longest label, which changes in each step."""
        def ctc(self, h):
            self.steps += 1
            scores = h.view(8, 4, 48).log_softmax(-1)
            lengths = torch.tensor([1 + self.steps % 3, 2, 1, 2])
            return h.tanh() + F.ctc_loss(scores, torch.arange(1, 13).view(4, 3), torch.full((4,), 8 - self.steps % 2), lengths) * 0.01

        with self.assertNoLogs("remat", logging.WARNING):
            self.check(type("Reading", (Net,), {"act": ctc, "begin": lambda self: setattr(self, "steps", 0)}), steps=8)


class SeveralGradients(Test):
    """A batch of gradients at once. The graph that the module's code has built runs the backward."""

    def test_batches(self):
        def by_autograd(y, x):
            return torch.autograd.grad(y, x, torch.eye(16)[:, None].expand(16, 32, 16), is_grads_batched=True, retain_graph=True)[0]

        def by_transform(y, x):
            return torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.eye(16)[:3, None].expand(3, 32, 16))

        for several in (by_autograd, by_transform):
            def step(model, x, k):
                y = model(x.requires_grad_())
                gradients = several(y, x)
                y.square().mean().backward()
                return [gradients, x.grad]

            with self.subTest(several.__name__), self.assertLogs("remat", logging.WARNING) as seen:
                self.check(Net, step)
            self.assertIn("several gradients at once", seen.output[0])

    def test_jacobian(self):
        def step(model, x, k):
            model.eval()
            jacobian = torch.autograd.functional.jacobian(model, x[:4], vectorize=True)
            backward(model, x, k)
            return [jacobian]

        self.check(Net, step)


class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        result = function(*args, **(kwargs or {}))
        return result * 1.5 if function is F.linear and self.calls % 3 == 0 else result


class CountingTensor(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.calls += 1
        return super().__torch_function__(function, types, args, kwargs or {})


class Observers(Test):
    """Function modes and subclasses of tensors see exactly the calls of the model."""

    def test_modes(self):
        mode = None

        def step(model, x, k):
            nonlocal mode
            mode = Counting() if k == 0 else mode
            with mode:
                y = model(x)
            y.square().mean().backward()
            return [torch.tensor(mode.calls)]

        self.check(Net, step)

    def test_subclasses(self):
        def step(model, x, k):
            CountingTensor.calls = 0 if k == 0 else CountingTensor.calls
            model(x.as_subclass(CountingTensor)).square().mean().backward()
            return [torch.tensor(CountingTensor.calls)]

        self.check(Net, step)


class Warnings(unittest.TestCase):
    def test_a_reason_is_named_once(self):
        """One warning for all shapes. It does not contain PyTorch's C++ stack frames."""
        class Nested(Net):
            def act(self, h):
                return torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([h[:3], h[3:8]]), 0.0).flatten(0, 1)

        model = remat.wrap(Nested(), cache=False)
        with self.assertLogs("remat", logging.WARNING) as seen:
            for rows in (8, 9, 10):
                model(torch.randn(rows, 16)).sum().backward()
        self.assertEqual(len(seen.output), 1)
        self.assertIn("nested", seen.output[0])
        self.assertNotIn("frame", seen.output[0])


if __name__ == "__main__":
    unittest.main()
