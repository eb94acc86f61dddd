# SPDX-License-Identifier: Apache-2.0
"""Models that read values, keep state or change between steps."""

import random
import subprocess
import sys

import numpy
import emulated
import pytest
import torch
from differential import assert_same, content, train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from hostile import batches, compare, made, refused


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside(reentrant):
    def middle(self, x):
        return checkpoint(lambda t: F.dropout(self.second(t).sin().exp(), 0.3), x, use_reentrant=reentrant)

    compare(lambda: made(middle))


def test_value_of_an_activation():
    e = refused(lambda: made(lambda self, x: x * x.sum().item()))
    assert "item" in f"{e} {e.operator} {e.source}" or "_local_scalar_dense" in str(e)
    assert e.source and "test_hostile_state.py" in e.source
    refused(lambda: made(lambda self, x: x if x.sum() > 0 else -x))
    refused(lambda: made(lambda self, x: x[x > 0].sum() + x))
    refused(lambda: made(lambda self, x: torch.tensor(x.tolist()) + x))


def test_value_of_a_parameter():
    """The forward branches on the value of a parameter, which changes with every step of the optimizer."""

    def middle(self, x):
        return x * 2 if self.first.weight.sum() > 0 else -x

    compare(lambda: made(middle))


def test_value_of_an_input():
    """The forward branches on an input, such as a flag."""

    def data():
        return [b | {"flag": torch.tensor(i % 2 == 0)} for i, b in enumerate(batches(6))]

    def middle(self, x, flag):
        return x * 2 if flag else -x

    compare(lambda: made(middle), data)


def test_numbers_as_arguments():
    def data():
        return [b | {"scale": float(i % 3), "how": ["a", "b"][i % 2]} for i, b in enumerate(batches(6))]

    compare(lambda: made(lambda self, x, scale, how: x * scale if how == "a" else x + scale), data)


def test_numpy_of_activations():
    refused(lambda: made(lambda self, x: x * torch.from_numpy(numpy.sign(x.detach().cpu().numpy())).to(x.device)))
    refused(lambda: made(lambda self, x: x * float(numpy.asarray(x.detach().cpu()).sum())))


def test_numpy_constants():
    compare(lambda: made(lambda self, x: x * torch.from_numpy(numpy.arange(6, dtype="float32")).to(x.device)))


@pytest.mark.parametrize("draw", [lambda self: random.random(), lambda self: random.gauss(0, 1), lambda self: numpy.random.rand(),
                                  lambda self: self.generator.random(), lambda self: self.python.random()],
                         ids=["random", "gauss", "numpy", "own numpy", "own python"])
def test_draws_of_python(draw):
    """A forward that draws from Python or numpy. A plan without the module's code would repeat the same numbers in every step."""

    def make():
        random.seed(3)
        numpy.random.seed(3)
        model = made(lambda self, x: x * draw(self))
        model.generator, model.python = numpy.random.default_rng(3), random.Random(3)
        return model

    refused(make, match="random|changes")


def test_first_import_of_numpy_is_no_draw():
    """The first forward may import `numpy.random`, in a process that has not imported it before."""
    code = ("import torch, remat\n"
            "class Model(torch.nn.Linear):\n"
            "    def forward(self, x):\n"
            "        import numpy.random\n"
            "        return super().forward(x)\n"
            "model = remat.wrap(Model(3, 3), (torch.rand(2, 3),))\n"
            "print(len(remat.of(model).plans))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_initialisation_by_the_first_batch():
    """The first batch initializes a scale, as in ActNorm."""

    def middle(self, x):
        if self.scale is None:
            self.scale = 1 / x.detach().std(0)
        return x * self.scale

    compare(lambda: made(middle, lambda self: setattr(self, "scale", None)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_hooks_compute():
    model = remat.wrap(nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.Tanh()), time_limit=1, gap=0.9, follow=False, on_refuse="raise")
    with pytest.raises(remat.Refused, match="the forward changes 0.weight") as e:
        model(torch.randn(4, 6))
    assert "parametrizations.weight_norm" in e.value.advice


def test_cache_of_a_constant():
    """A cached table of positions, which the first call makes, and which grows with the batch."""

    def middle(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=torch.float32).sin()
        return x + self.table[:len(x), None]

    compare(lambda: made(middle, lambda self: setattr(self, "table", None)))


def test_layer_drop():
    """Layers are skipped at random, as in Wav2Vec2."""

    def middle(self, x):
        for _ in range(4):
            if self.training and torch.rand(()).item() < 0.5:
                continue
            x = self.second(x)
        return x

    compare(lambda: made(middle))


def test_global_state():
    """A number outside of the model changes. With follow=False, the user must call `invalidate`."""
    for follow in (True, False):
        scale = [1.0]
        model = remat.wrap(made(lambda self, x: x * scale[0]), budget="75% of activations", time_limit=1, gap=0.9, follow=follow)
        train(model, batches())
        scale[0] = 2.0
        if not follow:
            remat.of(model).invalidate()
        other = made(lambda self, x: x * scale[0])
        other.load_state_dict(model.state_dict())
        assert_same(train(other, batches()), train(model, batches()))


def test_attributes_are_part_of_the_key():
    def run(model):
        seen = []
        for i, b in enumerate(batches(6)):
            model.scale, model.names, model.table = i % 2 + 1.0, ["a", "b"][:i % 3], {"k": [i % 2]}
            model.zero_grad()
            y = model(**b)
            y.sum().backward()
            seen += [content(y)] + [content(p.grad) for p in model.parameters()]
        return seen

    def middle(self, x):
        return x * self.scale + len(self.names) * self.table["k"][0]

    assert run(remat.wrap(made(middle), budget="75% of activations", time_limit=1, gap=0.9)) == run(made(middle))


def test_layouts_of_inputs():
    def data():
        g = emulated.generator(1)
        shapes = [lambda t: t, lambda t: t.t().contiguous().t(), lambda t: t[:, :6], lambda t: t.expand(40, 6),
                  lambda t: t.clone()]
        tensors = [torch.randn(40, 6, generator=g), torch.randn(40, 6, generator=g), torch.randn(40, 9, generator=g),
                   torch.randn(1, 6, generator=g), torch.randn(0, 6, generator=g)]
        return [{"x": f(t)} for f, t in zip(shapes, tensors)] * 2

    compare(lambda: made(), data)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(dtype):
    compare(lambda: made().to(dtype), lambda: [{"x": b["x"].to(dtype)} for b in batches()])


def test_gradient_hooks_on_activations():
    """Hooks on activations that compute new gradients."""

    def middle(self, x):
        if x.requires_grad:
            x.register_hook(lambda g: g * 2 + 1)
        return x

    compare(lambda: made(middle))


def test_forward_and_backward_on_another_thread():
    import threading

    def run(model):
        done = []
        torch.manual_seed(3)

        def work():
            torch.manual_seed(3)
            for b in batches():
                model.zero_grad()
                y = model(**b)
                y.sum().backward()
                done.extend([content(y)] + [content(p.grad) for p in model.parameters()])

        for _ in range(2):
            t = threading.Thread(target=work)
            t.start()
            t.join()
        return done

    assert run(remat.wrap(made(), budget="75% of activations", time_limit=1, gap=0.9)) == run(made())
