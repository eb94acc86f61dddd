# SPDX-License-Identifier: Apache-2.0
"""Uses that are easy to get silently wrong: equal to eager mode; where the forward is replayed, refused before any number."""

import functools
import random
import subprocess
import sys

import numpy
import pytest
import torch
from differential import assert_same, content, train
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import remat


class Deep(nn.Module):
    """A stack in whose middle a test puts something."""

    def __init__(self, middle=lambda self, x: x, prepare=lambda self: None):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.middle = middle
        prepare(self)

    def forward(self, x, **more):
        x = self.first(x).sin().exp().tanh()
        x = self.middle(self, x, **more)
        leaves = torch.utils._pytree.tree_map(lambda t: t if t is None else self.second(t).sin().exp().tanh().sin().cos(), x)
        return leaves


def batches(steps=4, **more):
    g = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(40, 6, generator=g)} | more for _ in range(steps)]


def made(*args):
    torch.manual_seed(0)
    return Deep(*args)


BUDGETS = ("100%", "75%")


def compare(make, data=batches, **how):
    """Trains plain and within budgets; gives the sessions."""
    plain = train(make(), data(), **how)
    sessions = []
    for budget in BUDGETS:
        model = remat.wrap(make(), budget=budget, time_limit=1)
        try:
            steps = train(model, data(), **how)
        except remat.OverBudget as e:
            model = remat.wrap(make(), budget=e.needed, time_limit=1)
            steps = train(model, data(), **how)
        assert_same(plain, steps)
        sessions.append(remat.of(model))
    return sessions


def refused(make, data=batches, match=None, **how):
    """Where the forward is replayed it is refused, and leaves the model, its data and the generator as they were. Else it is as in eager mode."""
    compare(make, data, **how)
    for budget in BUDGETS:
        model = remat.wrap(make(), budget=budget, time_limit=1, follow=False, on_refuse="raise")
        state = {n: content(t) for n, t in model.state_dict().items()}
        generator = torch.get_rng_state()
        inputs = data()[0]
        before = {n: content(t) for n, t in inputs.items()}
        with pytest.raises(remat.Refused, match=match) as e:
            model(**inputs)
        assert {n: content(t) for n, t in model.state_dict().items()} == state
        assert {n: content(t) for n, t in inputs.items()} == before
        assert torch.equal(generator, torch.get_rng_state())
    plain = train(make(), data(), **how)
    assert_same(plain, train(remat.wrap(make(), budget="75%", time_limit=1, follow=False), data(), **how))
    return e.value


# --- functions of one's own -----------------------------------------------------------------------------------------------------


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
    """Rounds in place; lets gradients through."""

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


# --- inputs and outputs ---------------------------------------------------------------------------------------------------------


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
        train(remat.wrap(through(FORMS[form]), budget="95%", time_limit=1), planned)
        assert [content(b["x"].grad) for b in plain] == [content(b["x"].grad) for b in planned]


# --- modules ---------------------------------------------------------------------------------------------------------------------


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
    """Written as `self.mean = ...` in the forward."""

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
    for session in compare(lambda: made(lambda self, x: x, lambda self: self.register_parameter("no", nn.Parameter(torch.ones(2))))):
        assert session.plan["operations"] > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside(reentrant):
    def middle(self, x):
        return checkpoint(lambda t: F.dropout(self.second(t).sin().exp(), 0.3), x, use_reentrant=reentrant)

    compare(lambda: made(middle))


# --- what depends on more than tensors -------------------------------------------------------------------------------------------


def test_value_of_an_activation():
    e = refused(lambda: made(lambda self, x: x * x.sum().item()))
    assert "item" in f"{e} {e.operator} {e.source}" or "_local_scalar_dense" in str(e)
    assert e.source and "test_hostile.py" in e.source
    refused(lambda: made(lambda self, x: x if x.sum() > 0 else -x))
    refused(lambda: made(lambda self, x: x[x > 0].sum() + x))
    refused(lambda: made(lambda self, x: torch.tensor(x.tolist()) + x))


def test_value_of_a_parameter():
    """Changes with every step of the optimizer."""

    def middle(self, x):
        return x * 2 if self.first.weight.sum() > 0 else -x

    compare(lambda: made(middle))


def test_value_of_an_input():
    """Flags."""

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
    refused(lambda: made(lambda self, x: x * torch.from_numpy(numpy.sign(x.detach().numpy()))))
    refused(lambda: made(lambda self, x: x * float(numpy.asarray(x.detach()).sum())))


def test_numpy_constants():
    compare(lambda: made(lambda self, x: x * torch.from_numpy(numpy.arange(6, dtype="float32"))))


@pytest.mark.parametrize("draw", [lambda self: random.random(), lambda self: random.gauss(0, 1), lambda self: numpy.random.rand(),
                                  lambda self: self.generator.random(), lambda self: self.python.random()],
                         ids=["random", "gauss", "numpy", "own numpy", "own python"])
def test_draws_of_python(draw):
    """What the forward draws from Python or numpy would be the same in every planned step."""

    def make():
        random.seed(3)
        numpy.random.seed(3)
        model = made(lambda self, x: x * draw(self))
        model.generator, model.python = numpy.random.default_rng(3), random.Random(3)
        return model

    refused(make, match="random|changes")


def test_first_import_of_numpy_is_no_draw():
    """In a process that has imported nothing else, the first forward may be the first to need `numpy.random`."""
    code = ("import torch, remat\n"
            "class Model(torch.nn.Linear):\n"
            "    def forward(self, x):\n"
            "        import numpy.random\n"
            "        return super().forward(x)\n"
            "model = remat.wrap(Model(3, 3), (torch.rand(2, 3),))\n"
            "print(len(remat.of(model).plans))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_initialisation_by_the_first_batch():
    """As ActNorm does it."""

    def middle(self, x):
        if self.scale is None:
            self.scale = 1 / x.detach().std(0)
        return x * self.scale

    compare(lambda: made(middle, lambda self: setattr(self, "scale", None)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_hooks_compute():
    model = remat.wrap(nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.Tanh()), time_limit=1, follow=False, on_refuse="raise")
    with pytest.raises(remat.Refused, match="the forward changes 0.weight") as e:
        model(torch.randn(4, 6))
    assert "parametrizations.weight_norm" in e.value.advice


def test_cache_of_a_constant():
    """Positions that the first call makes, and tables that grow."""

    def middle(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=torch.float32).sin()
        return x + self.table[:len(x), None]

    compare(lambda: made(middle, lambda self: setattr(self, "table", None)))


def test_layer_drop():
    """As Wav2Vec2 and others do it."""

    def middle(self, x):
        for _ in range(4):
            if self.training and torch.rand(()).item() < 0.5:
                continue
            x = self.second(x)
        return x

    compare(lambda: made(middle))


def test_global_state():
    """A number outside of the model that changes: `invalidate` is for that where the forward is replayed."""
    for follow in (True, False):
        scale = [1.0]
        model = remat.wrap(made(lambda self, x: x * scale[0]), budget="75%", time_limit=1, follow=follow)
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

    assert run(remat.wrap(made(middle), budget="75%", time_limit=1)) == run(made(middle))


def test_layouts_of_inputs():
    def data():
        g = torch.Generator().manual_seed(1)
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
    """Hooks that compute."""

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

    assert run(remat.wrap(made(), budget="75%", time_limit=1)) == run(made())
