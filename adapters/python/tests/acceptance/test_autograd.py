# SPDX-License-Identifier: Apache-2.0
"""Common uses of gradients, hooks and random numbers."""

import gc

import emulated
import pytest
import torch
from differential import assert_same, content, train
from test_module import Net, batches, made, wrapped
from torch import nn

import remat


@pytest.mark.parametrize("budget", ["100% of activations", "60% of activations"])
def test_hooks(budget, caplog):
    """Hooks of the model and of its parameters run as in eager mode."""

    def run(model):
        calls = []
        model.register_forward_pre_hook(lambda m, a: calls.append("before"))
        model.register_forward_hook(lambda m, a, y: calls.append(("after", content(y))))
        model.register_full_backward_hook(lambda m, gx, gy: calls.append(("backward", content(gy[0]))))
        for n, p in model.named_parameters():
            if p.requires_grad:
                p.register_hook(lambda g, n=n: calls.append((n, content(g))))
                p.register_post_accumulate_grad_hook(lambda p, n=n: calls.append((n, "done", content(p.grad))))
        model.first.weight.register_hook(lambda g: g * 2)
        torch.manual_seed(3)
        for (x,) in batches(3):
            model.zero_grad()
            model(x).square().sum().backward()
            calls.append([content(p.grad) for p in model.parameters()])
        return sorted(map(repr, calls))

    assert run(wrapped(budget)) == run(made())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_detection_of_anomalies():
    """`detect_anomaly` reads all gradients and finds NaN in them."""
    steps = [train(model, batches(2)) for model in (made(), wrapped("100% of activations"))]
    with torch.autograd.detect_anomaly():
        model = wrapped("100% of activations")
        steps.append(train(model, batches(2)))
        with pytest.raises(RuntimeError, match="nan"):
            train(model, batches(1), loss=lambda y: y.sum() * float("nan"))
    assert_same(steps[0], steps[1])
    assert_same(steps[0], steps[2])


def test_hooks_inside_are_named(caplog):
    """Hooks of inner modules run in every step. With follow=False they run only during capture, and a warning says so."""
    for follow in (True, False):
        model = wrapped(follow=follow)
        seen = []
        model.first.register_forward_hook(lambda m, a, y: seen.append(1))
        steps = train(model, batches())
        assert seen and (len(seen) == len(steps)) == follow
        assert ("first" in caplog.text) != follow


def test_hooks_inside_that_compute_are_planned():
    """Computations in hooks of inner modules are part of the plan."""

    def with_hook(model):
        model.first.register_forward_hook(lambda m, a, y: y * 3)
        return model

    assert_same(train(with_hook(made()), batches()), train(with_hook(wrapped()), batches()))


@pytest.mark.parametrize("budget", ["100% of activations", "60% of activations"])
def test_grad(budget):
    """`torch.autograd.grad` gives the gradients of eager mode, and sets no `.grad`."""

    def run(model):
        torch.manual_seed(3)
        seen = []
        for (x,) in batches(3):
            x.requires_grad_()
            y = model(x)
            seen += [content(g) for g in torch.autograd.grad(y.sum(), [x, model.first.weight, model.norm.bias])]
            y = model(x)
            seen += [content(g) for g in torch.autograd.grad(y[:3].sin().sum(), list(model.second.parameters()) + [x])]
            assert x.grad is None and all(p.grad is None for p in model.parameters())
        return seen

    assert run(wrapped(budget)) == run(made())


@pytest.mark.parametrize("budget", ["100% of activations", "60% of activations"])
def test_two_forwards_before_a_backward(budget):
    """Two calls before a backward. The model uses each weight once; with two uses, each call would sum its own terms first."""

    def run(model):
        model.third = nn.Linear(8, 8)
        torch.manual_seed(3)
        seen = []
        for (x,) in batches(3):
            model.zero_grad()
            a, b = model(x), model(x * 2)
            (a.sum() * b.sum()).backward()
            seen += [content(t) for t in (a, b)] + [content(p.grad) for p in model.parameters()]
            c, d = model(x), model(x + 1)
            c.sum().backward()
            d.square().sum().backward()
            seen += [content(p.grad) for p in model.parameters()]
        return seen

    assert run(wrapped("200% of activations" if budget == "100% of activations" else "160% of activations")) == run(made())


def test_functional_call():
    """`torch.func.functional_call` puts gradients on the given parameters, not on those of the model."""

    def run(model):
        other = {n: (p.detach() * 1.5).requires_grad_() for n, p in made().named_parameters()}
        torch.manual_seed(3)
        seen = []
        for (x,) in batches(3):
            y = torch.func.functional_call(model, other, (x,))
            y.square().sum().backward()
            seen += [content(t.grad) for t in other.values()] + [content(y)]
            assert all(p.grad is None for p in model.parameters())
        model(x).sum().backward()
        return seen + [content(p.grad) for p in model.parameters()]

    assert run(wrapped()) == run(made())


def test_transforms_are_refused():
    """Function transforms of a wrapped model are refused. They work while the session is paused."""
    model = wrapped(on_refuse="raise")
    state = {n: p.detach() for n, p in model.named_parameters()}
    with pytest.raises(remat.Refused, match="torch.func"):
        torch.func.grad(lambda s: torch.func.functional_call(model, s, batches()[0]).sum())(state)
    with remat.of(model).paused():
        torch.func.grad(lambda s: torch.func.functional_call(model.eval(), s, batches()[0]).sum())(state)


def test_second_backward():
    """A second backward of the same forward, and a backward through gradients."""

    def run(model):
        x = batches()[0][0].requires_grad_()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum().backward()
        return [content(t.grad) for t in (x, *model.parameters())]

    assert run(wrapped()) == run(made())


def test_second_backward_of_a_replayed_forward():
    """A second backward with follow=False is refused, and changes no gradient."""
    model = wrapped(follow=False)
    x = batches()[0][0].requires_grad_()
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    before = {n: content(p.grad) for n, p in model.named_parameters()}
    with pytest.raises((remat.Refused, RuntimeError), match="backward"):
        loss.backward()
    assert {n: content(p.grad) for n, p in model.named_parameters()} == before
    with pytest.raises((remat.Refused, RuntimeError), match="graph|twice|second"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].sum().backward()


def test_thousand_forwards_without_backward():
    """Forwards without a backward leave no memory behind."""
    model = wrapped()
    x = batches()[0][0]
    train(model, batches())
    session = remat.of(model)
    session.release(), gc.collect(), session.reset_peak()
    live = session.memory()["peak"]
    for _ in range(1000):
        model(x)
    gc.collect(), session.release(), session.reset_peak()
    assert session.memory()["peak"] <= live
    plain = made()
    train(plain, batches())
    with torch.no_grad():
        for _ in range(1000):
            plain(x)
    assert_same(train(plain, batches()), train(model, batches()))


class Failing(Net):
    """A model that raises an error if `fail` is True."""

    def forward(self, x, fail=False):
        x = self.drop(self.first(x))
        if fail:
            raise KeyError("no")
        return super().forward(x[:, :6])


def test_exceptions():
    """After an exception in the forward or in a hook, training continues as in eager mode."""

    def run(model):
        torch.manual_seed(3)
        seen = []
        for i, (x,) in enumerate(batches(6)):
            model.zero_grad()
            if i % 2:
                with pytest.raises(KeyError):
                    model(x, fail=True)
            else:
                y = model(x)

                def hook(g):
                    raise ValueError("in a hook")

                if i == 2:
                    handle = y.register_hook(hook)
                    with pytest.raises(ValueError):
                        y.sum().backward()
                    handle.remove()
                    model.zero_grad()
                else:
                    y.sum().backward()
                del y
            seen += [content(p.grad) for p in model.parameters()] + [content(t) for t in model.buffers()]
        return seen

    def failing():
        torch.manual_seed(0)
        return Failing()

    assert run(wrapped("60% of activations", failing())) == run(failing())


@pytest.mark.parametrize("budget", ["100% of activations", "60% of activations"])
def test_seeds(budget):
    """After `torch.manual_seed`, outputs and the generator equal eager mode."""

    def run(model):
        seen = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            for (x,) in batches(2):
                model.zero_grad()
                y = model(x)
                y.sum().backward()
                seen += [content(y), content(torch.rand(3)), emulated.random_state().numpy().tobytes()]
        return seen

    assert run(wrapped(budget)) == run(made())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """A user's autocast block around forward and loss, or none, with a gradient scaler."""

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        torch.manual_seed(3)
        seen = []
        for i, (x,) in enumerate(batches(6)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=i != 3):
                y = model(x)
                loss = y.float().square().sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            seen.append(content(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            scaler.step(optimizer)
            scaler.update()
            seen += [content(y), scaler.get_scale()] + [content(p) for p in model.parameters()]
        return seen

    assert run(wrapped()) == run(made())
