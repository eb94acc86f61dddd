# SPDX-License-Identifier: Apache-2.0
"""Uses that are easy to get silently wrong. Followed steps equal eager mode. With follow=False they are refused before any computation."""

import functools

import pytest
import torch
from differential import content, train
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import remat
from hostile import batches, compare, made, refused


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(flag := x > 0)
        return x * x * x, flag

    @staticmethod
    def backward(ctx, gradient, _):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x + 0.125


class Straight(torch.autograd.Function):
    """Rounds in place. The backward passes gradients through unchanged."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.round_()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


@pytest.mark.parametrize("middle", [lambda self, x: Cube.apply(x)[0], lambda self, x: torch.where(Cube.apply(x)[1], x, -x),
                                    lambda self, x: Straight.apply(x * 4)])
def test_own_function(middle):
    compare(lambda: made(middle))


class In(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, **tensors):
        return self.function(self.linear, **tensors)


def through(function, *flags):
    torch.manual_seed(0)
    return In(function)


def body(y):
    return y.sin().exp().tanh().sin().cos()


FORMS = {
    "in place on an input": lambda f, x: body(f(x.add_(1))),
    "an input is returned": lambda f, x: (x, body(f(x))),
    "a view of an input": lambda f, x: (x[1:], body(f(x))),
    "a view": lambda f, x: body(f(x))[::2].t(),
    "views of one tensor": lambda f, x: (lambda y: (y[:3], y[3:], y))(body(f(x))),
    "the same twice": lambda f, x: (lambda y: [y, {"again": y}])(body(f(x))),
    "nothing and nested": lambda f, x: {"a": None, "b": [body(f(x)), (1, "text", None)], "c": {}},
    "expanded": lambda f, x: body(f(x)).sum(0, keepdim=True).expand(5, 6),
    "detached": lambda f, x: (body(f(x)), body(f(x)).detach(), f(x).argmax(1)),
    "channels last": lambda f, x: body(f(x)).view(2, 4, 5, 6).to(memory_format=torch.channels_last),
    "double": lambda f, x: body(f(x).double()),
    "bfloat16": lambda f, x: body(f(x).bfloat16()),
    "complex": lambda f, x: body(torch.view_as_complex(f(x).view(40, 3, 2))),
    "spectrum": lambda f, x: torch.fft.rfft(body(f(x)), dim=0),
    "real of complex": lambda f, x: torch.fft.ifft(torch.fft.fft(body(f(x)))).real,
    "a generator that draws": lambda f, x: body(f(x)) * torch.rand(6) + torch.randn_like(x),
    "no gradient inside": lambda f, x: body(f(x)) + torch.no_grad()(f)(x),
    "gradient inside": lambda f, x: body(torch.autograd.grad(f(x).square().sum(), f.weight)[0] + f.weight),
    "numbers of shapes": lambda f, x: body(f(x)) * x.shape[0] / float(x.size(1)),
    "sorted": lambda f, x: body(f(x)).sort(0).values.cumsum(0),
    "loop": lambda f, x: functools.reduce(lambda y, i: y.index_add(0, torch.tensor([i]), body(f(x))[i:i + 1]), range(3), x),
}


@pytest.mark.parametrize("form", FORMS)
def test_form(form):
    compare(lambda: through(FORMS[form]))


def test_loss_uses_some_outputs():
    function = lambda f, x: tuple(body(f(x) * i) for i in (1, 2, 3))  # noqa: E731
    for part in ((0,), (2,), (0, 2)):
        compare(lambda: through(function), loss=lambda out, part=part: sum(out[i].square().sum() for i in part))
    uses = iter([0, 1, 2, 0, 1, 2] * 3)
    compare(lambda: through(function), data=lambda: batches(6), loss=lambda out: out[next(uses)].sum())


def test_inputs_with_gradients():
    def data():
        return [{"x": b["x"].requires_grad_()} for b in batches()]

    for form in ("a view", "the same twice", "detached", "views of one tensor"):
        plain, planned = data(), data()
        train(through(FORMS[form]), plain)
        train(remat.wrap(through(FORMS[form]), budget="95% of activations", time_limit=1, gap=0.9), planned)
        assert [content(b["x"].grad) for b in plain] == [content(b["x"].grad) for b in planned]


def average(self, x):
    with torch.no_grad():
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.count += 1
    return x - self.mean


def test_buffers_that_every_step_updates():
    def prepare(self):
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    compare(lambda: made(average, prepare))


def test_buffer_that_is_replaced():
    """The forward replaces a buffer by `self.mean = ...`."""

    def middle(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean

    refused(lambda: made(middle, lambda self: self.register_buffer("mean", torch.zeros(6))))


def test_counter_in_python():
    def middle(self, x):
        self.calls += 1
        return x * self.calls

    refused(lambda: made(middle, lambda self: setattr(self, "calls", 0)), match="calls")


@pytest.mark.parametrize("change", [
    lambda m: parametrizations.weight_norm(m.first),
    lambda m: nn.utils.weight_norm(m.first),
    lambda m: parametrizations.spectral_norm(m.first),
    lambda m: nn.utils.spectral_norm(m.first),
    lambda m: parametrizations.orthogonal(m.first),
    lambda m: parametrize.register_parametrization(m.first, "weight", nn.Tanh()),
    lambda m: prune.l1_unstructured(m.first, "weight", 0.5),
], ids=["weight_norm", "old weight_norm", "spectral_norm", "old spectral_norm", "orthogonal", "own", "pruned"])
@pytest.mark.filterwarnings("ignore")
def test_parametrized(change):
    def make():
        model = made()
        change(model)
        return model.train()

    compare(make)


def test_shared_and_frozen():
    def prepare(self):
        self.third = self.first
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    compare(lambda: made(lambda self, x: self.third(x), prepare))


def test_unused_parameter():
    for model in compare(lambda: made(lambda self, x: x, lambda self: self.register_parameter("no", nn.Parameter(torch.ones(2))))):
        assert remat.of(model).plan.operations > 0
