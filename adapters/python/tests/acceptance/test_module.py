# SPDX-License-Identifier: Apache-2.0
"""Common uses of a module. A wrapped module behaves as before."""

import copy
import io
import pickle

import emulated
import pytest
import torch
from differential import assert_same, content, train
from torch import nn

import remat


class Net(nn.Module):
    """A model with dropout, batch norm, a frozen layer and tied weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.drop = nn.Dropout(0.25)

    def forward(self, x, scale=1.0):
        x = self.drop(self.norm(self.first(x)).relu())
        x = self.second(self.frozen(x).tanh()).sigmoid().sin().exp().tanh().sin().cos()
        return self.third(x).sin().exp().tanh().sin() * scale


def made():
    torch.manual_seed(0)
    return Net()


def batches(steps=4, n=50):
    g = emulated.generator(1)
    return [(torch.randn(n, 6, generator=g),) for _ in range(steps)]


def wrapped(budget="60% of activations", model=None, **options):
    return remat.wrap(model or made(), budget=budget, time_limit=1, gap=0.9, **options)


def public(model):
    return {name for name in dir(model) if not name.startswith("_")}


def test_wrap_returns_the_same_object():
    """`wrap` keeps type, attributes, names and results of a model; `unwrap` restores the plain model."""
    model, plain = made(), made()
    names, text, kind = public(model), repr(model), type(model)
    assert remat.wrap(model, budget="1 GiB") is model
    assert type(model) is kind and isinstance(model, Net)
    assert repr(model) == text
    assert public(model) == names
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert remat.is_wrapped(model) and not remat.is_wrapped(plain)
    assert_same(train(plain, batches()), train(model, batches()))
    assert remat.unwrap(model) is model and not remat.is_wrapped(model)
    assert sorted(dir(model)) == sorted(dir(plain)) and "forward" not in model.__dict__
    assert remat.unwrap(model) is model


@pytest.mark.parametrize("budget", ["100% of activations", "60% of activations"])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_optimizer_before_or_after(optimizer_first, budget):
    """The optimizer may be made before or after `wrap`, which keeps the parameters."""

    def run(planned):
        model = made()
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) if optimizer_first else None
        if planned:
            wrapped(budget, model)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        assert all(a is b for a, b in zip(parameters, model.parameters()))
        torch.manual_seed(2)
        for (x,) in batches():
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return {n: content(t) for n, t in model.state_dict().items()}

    assert run(True) == run(False)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(assign):
    """A wrapped model saves and loads the state_dict of the plain model."""
    plain, model = made(), wrapped()
    train(plain, batches())
    train(model, batches())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = made()
    fresh.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert {n: content(t) for n, t in fresh.state_dict().items()} == {n: content(t) for n, t in plain.state_dict().items()}
    torch.manual_seed(5)
    other = Net()
    state = copy.deepcopy(other.state_dict())
    plain.load_state_dict(state, assign=assign)
    model.load_state_dict(copy.deepcopy(state), assign=assign)
    assert_same(train(plain, batches()), train(model, batches()))
    assert remat.of(model).plan["recomputed"] > 0


@pytest.mark.parametrize("budget", ["100% of activations", "60% of activations"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clip", [None, nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_accumulation_and_clipping(budget, set_to_none, clip):
    """Gradients of micro-batches accumulate, and are clipped, as in eager mode."""

    def run(model):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        torch.manual_seed(3)
        seen = []
        for i, (x,) in enumerate(batches(9)):
            (model(x).square().sum() / 3).backward()
            if i % 3 == 2:
                if clip:
                    seen.append(content(clip(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            seen += [content(p.grad) for p in model.parameters()] + [content(p) for p in model.parameters()]
        return seen

    assert run(wrapped(budget)) == run(made())


def test_no_grad_in_training():
    """Evaluation between training steps, with no_grad, inference_mode and eval."""

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(3)
        seen = []
        for (x,) in batches(4):
            optimizer.zero_grad()
            y = model(x)
            with torch.no_grad():
                seen.append(content(model(x)))
            with torch.inference_mode():
                seen.append(content(model(x)))
            y.square().sum().backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                seen.append(content(model(x)))
            seen.append(content(model(x).detach()))
            model.train()
            seen += [content(t) for t in model.state_dict().values()] + [emulated.random_state().numpy().tobytes()]
        return seen

    assert run(wrapped()) == run(made())


def test_deepcopy_owns_its_weights():
    """A deep copy of a wrapped model is wrapped, with its own weights and session."""
    model = wrapped()
    plain = made()
    train(model, batches()), train(plain, batches())
    twin, plain_twin = copy.deepcopy(model), copy.deepcopy(plain)
    assert remat.is_wrapped(twin) and remat.of(twin) is not remat.of(model)
    assert not {t.data_ptr() for t in twin.parameters()} & {t.data_ptr() for t in model.parameters()}
    assert_same(train(plain_twin, batches()), train(twin, batches()))
    assert_same(train(plain, batches()), train(model, batches()))


def test_moving_average():
    """A moving average of the weights by `torch.optim.swa_utils`."""

    def run(model):
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(3)
        for (x,) in batches(5):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            average.update_parameters(model)
        return [content(t) for t in average.state_dict().values()]

    assert run(wrapped()) == run(made())


def test_pickle():
    """A pickle of a wrapped model has hardly more bytes than one of the plain model, and loads as a plain model."""
    model, plain = wrapped(), made()
    train(model, batches()), train(plain, batches())
    for write, read in ((pickle.dump, pickle.load), (torch.save, lambda f: torch.load(f, weights_only=False))):
        file, plain_file = io.BytesIO(), io.BytesIO()
        model.zero_grad(), plain.zero_grad()
        write(model, file), write(plain, plain_file)
        assert file.tell() < plain_file.tell() + 1000
        file.seek(0)
        loaded = read(file)
        expected = copy.deepcopy(plain)
        assert_same(train(expected, batches()), train(loaded, batches()))
        remat.wrap(loaded, budget="60% of activations", time_limit=1, gap=0.9)
        assert_same(train(expected, batches()), train(loaded, batches()))


def test_changes_of_the_model():
    """Changes of the model between steps take effect in the next step."""

    def run(model, planned):
        torch.manual_seed(4)
        seen = []

        def step(dtype=torch.float32):
            x = torch.randn(50, 6).to(dtype)
            for _ in range(2):
                model.zero_grad()
                y = model(x)
                y.square().sum().backward()
                seen.append(content(y))
                seen.extend((n, content(p.grad)) for n, p in model.named_parameters())
                if planned:
                    assert remat.of(model).plan["recomputed"] > 0

        step()
        model.frozen.requires_grad_(True)
        step()
        model.first.requires_grad_(False)
        step()
        model.extra = nn.Linear(3, 3)  # a module that the forward does not use
        step()
        model.second = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        step()
        model.third.weight = model.second[0].weight
        step()
        with torch.no_grad():
            model.norm.weight.copy_(torch.rand(8))
            model.norm.bias = nn.Parameter(torch.rand(8))
            model.third.weight.data = torch.rand(8, 8)
        step()
        model.drop.p = 0.5
        step()
        model.drop = nn.Identity()
        step()
        model.eval()
        step()
        nn.utils.parametrizations.weight_norm(model.second[0])
        step()
        model.to(torch.float64)
        step(torch.float64)
        return seen

    assert run(wrapped(), True) == run(made(), False)


def test_wrap_again_changes_the_budget():
    """Wrapping again, or `set_budget`, changes the budget of the same session."""
    model = wrapped("100% of activations")
    train(model, batches())
    assert remat.of(model).plan["recomputed"] == 0
    session = remat.of(model)
    assert remat.wrap(model, budget="60% of activations", time_limit=1, gap=0.9) is model
    assert remat.of(model) is session
    assert_same(train(made(), batches()), train(wrapped("60% of activations"), batches()))
    train(model, batches())
    assert session.plan["recomputed"] > 0
    session.set_budget("100% of activations")
    train(model, batches())
    assert session.plan["recomputed"] == 0


def test_budgets_are_parsed_alike():
    """Equal budgets as numbers and texts are equal. Wrong values raise errors."""
    seen = set()
    for budget in ("8GB", "8 GB", 8e9, 8_000_000_000, "8000000000", "8000000000 B"):
        model = wrapped(budget)
        train(model, batches(1))
        seen.add(remat.of(model).memory()["budget"])
    assert seen == {8_000_000_000}
    model = wrapped("8 GiB")
    train(model, batches(1))
    assert remat.of(model).memory()["budget"] == 8 << 30
    model = wrapped("60%")
    train(model, batches(1))
    assert remat.of(model).memory()["planned"] <= remat.of(model).memory()["budget"]
    for wrong in ("8 XB", "", "-1", -1, "120 % of it", float("nan"), float("inf")):
        with pytest.raises((ValueError, remat.Error)):
            remat.wrap(made(), budget=wrong)
    for wrong in ([], True, b"8"):
        with pytest.raises(TypeError):
            remat.wrap(made(), budget=wrong)
    for option in ("budget", "activation_budget", "host_budget"):
        for wrong in ("8 XB", -1, float("nan"), 0.5):
            with pytest.raises((ValueError, remat.Error), match=f"^{option}"):
                remat.wrap(made(), **{option: wrong})


@pytest.mark.parametrize("options", [{"solver": None}, {"seed": -1}, {"seed": 1.5}, {"time_limit": "20"}, {"gap": float("nan")}, {"verify": "all"}, {"cache": 3}])
def test_options_are_named(options):
    (name,) = options
    model = made()
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
        remat.wrap(model, **options)
    assert not remat.is_wrapped(model)


def test_arguments_that_are_no_tuple():
    model, (x,) = made(), batches(1)[0]
    for call in (remat.wrap, remat.plan, remat.curve):
        with pytest.raises(TypeError, match=r"args must be a tuple .*\(x,\)"):
            call(model, x)
    assert not remat.is_wrapped(model)
    with pytest.raises(remat.Error, match="Tensor is not wrapped"):
        remat.of(x)


def test_over_budget_says_what_it_would_take():
    """OverBudget names the smallest known budget and its bound, and leaves the model unchanged."""
    model = wrapped(1000)
    state = {n: content(t) for n, t in model.state_dict().items()}
    generator = emulated.random_state()
    with pytest.raises(remat.OverBudget, match="out of memory") as over:
        model(*batches()[0])
    assert over.value.needed >= over.value.bound > 1000
    assert over.value.largest
    assert {n: content(t) for n, t in model.state_dict().items()} == state
    assert torch.equal(generator, emulated.random_state())
    remat.wrap(model, budget=over.value.needed, time_limit=1, gap=0.9)
    assert_same(train(made(), batches()), train(model, batches()))
