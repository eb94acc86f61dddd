# SPDX-License-Identifier: Apache-2.0
"""Optimizers with states on a disk: results, remaining files and memory, and errors if space is missing."""

import copy
import io
import pickle

import pytest
import torch
from compare import same

import remat
from optimizing import WIDTH, batch, net, train, weights


def groups(model):
    return [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3}]


AS = {"disk": {"disk": "."}, "overlap": {"step": "overlap"}, "disk and overlap": {"disk": ".", "step": "overlap"}, "memory": {}}


ways = pytest.mark.parametrize("way", AS.values(), ids=AS.keys())


CLASSES = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}, True),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}, False),
    "AdamW, neither": (torch.optim.AdamW, {"lr": 1e-2, "fused": False}, False),
    "Adam, amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True, "weight_decay": 0.1}, True),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, True),
    "SGD without states": (torch.optim.SGD, {"lr": 1e-2}, True),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}, True),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5}, False),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}, False),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}, False),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}, False),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}, False),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}, False),
}


@ways
@pytest.mark.parametrize("kind", CLASSES)
def test_equal_bit_by_bit(kind, way):
    cls, options, fused = CLASSES[kind]
    plain, ours = net(), net()
    a = cls(groups(plain), **options, **({"fused": True} if fused else {}))
    b = remat.optimizer(groups(ours), cls, **options, **way)
    train(plain, a, scheduler=torch.optim.lr_scheduler.LambdaLR(a, lambda i: 1 / (1 + i)))
    train(ours, b, scheduler=torch.optim.lr_scheduler.LambdaLR(b, lambda i: 1 / (1 + i)))
    assert isinstance(b, cls) and isinstance(b, torch.optim.Optimizer)
    assert same(weights(ours), weights(plain))
    assert not same(weights(ours), weights(net()))
    assert same(b.state_dict(), a.state_dict())
    large = sum(t.nbytes for state in a.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.nbytes >= 4096)
    assert b.memory()["disk"] == (large if "disk" in way else 0)


@ways
@pytest.mark.parametrize("kind", ["bfloat16", "complex", "channels last", "double"])
def test_other_parameters(kind, way):
    def made():
        torch.manual_seed(4)
        if kind == "channels last":
            return torch.nn.Conv2d(8, 32, 5).to(memory_format=torch.channels_last), torch.randn(2, 8, 9, 9)
        if kind == "complex":
            return torch.nn.Linear(64, 64, dtype=torch.complex64), torch.randn(2, 64, dtype=torch.complex64)
        dtype = getattr(torch, {"double": "float64"}.get(kind, kind))
        return torch.nn.Linear(WIDTH, WIDTH, dtype=dtype), torch.randn(2, WIDTH, dtype=dtype)

    (plain, x), (ours, _) = made(), made()
    a = torch.optim.AdamW(plain.parameters(), 1e-2, fused=None if kind == "complex" else True)
    b = remat.optimizer(ours.parameters(), lr=1e-2, **way)
    for model, optimizer in ((plain, a), (ours, b)):
        for _ in range(5):
            optimizer.zero_grad()
            model(x).abs().square().mean().backward()
            optimizer.step()
    assert same(weights(ours), weights(plain))
    assert same(b.state_dict(), a.state_dict())
    assert (b.memory()["disk"] > 0) == ("disk" in way)


@ways
def test_types_mixed_in_a_group(way):
    """Groups with mixed types. Adafactor uses one epsilon per group, which depends on the type of its first parameter."""
    def run(make):
        torch.manual_seed(4)
        layers = torch.nn.ModuleList((torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)))
        optimizer = make(layers.parameters())
        for i in range(4):
            optimizer.zero_grad()
            layers[1](layers[0](batch(i)).bfloat16()).float().square().mean().backward()
            optimizer.step()
        return weights(layers)

    assert same(run(lambda p: remat.optimizer(p, torch.optim.Adafactor, lr=1e-2, **way)), run(lambda p: torch.optim.Adafactor(p, 1e-2)))


@ways
@pytest.mark.parametrize("cls, options", [(torch.optim.SparseAdam, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {})])
def test_sparse_gradients(cls, options, way):
    plain, ours = (torch.nn.Embedding(256, 16, sparse=True) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    a, b = cls(plain.parameters(), lr=0.1, **options), remat.optimizer(ours.parameters(), cls, lr=0.1, **options, **way)
    for model, optimizer in ((plain, a), (ours, b)):
        for i in range(4):
            optimizer.zero_grad()
            model(torch.tensor([i, 7, 7])).square().sum().backward()
            optimizer.step()
    assert same(weights(ours), weights(plain))


@ways
def test_frozen_parameters_those_without_gradients_and_late_groups(way):
    def run(make):
        torch.manual_seed(2)
        layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        layers[3].requires_grad_(False)
        optimizer = make(list(layers[:2].parameters()))
        for i in range(9):
            if i == 2:
                optimizer.add_param_group({"params": list(layers[2:].parameters()), "lr": 1e-3})
            if i == 5:
                layers[3].requires_grad_(True)
            x = batch(i)
            for layer in layers if i % 3 else layers[1:]:
                x = layer(x)
            optimizer.zero_grad()
            x.square().mean().backward()
            optimizer.step()
        states = optimizer.state_dict()
        return weights(layers), states["param_groups"], sorted(states["state"].items())

    assert same(run(lambda p: remat.optimizer(p, lr=1e-2, **way)), run(lambda p: torch.optim.AdamW(p, 1e-2, fused=True)))


@ways
def test_state_dict_goes_into_the_plain_class_and_back(way):
    plain, ours = net(), net()
    a, b = torch.optim.AdamW(groups(plain), 1e-2, fused=True), remat.optimizer(groups(ours), lr=1e-2, **way)
    train(plain, a)
    train(ours, b, 10)
    saved = io.BytesIO()
    torch.save({"model": ours.state_dict(), "optimizer": b.state_dict()}, saved)
    middle = net()
    c = torch.optim.AdamW(groups(middle), 1)
    restored = torch.load(io.BytesIO(saved.getvalue()))
    middle.load_state_dict(restored["model"])
    c.load_state_dict(restored["optimizer"])
    train(middle, c, 5, first=10)
    last = net()
    last.load_state_dict(middle.state_dict())
    d = remat.optimizer(groups(last), lr=1, **way)
    d.load_state_dict(copy.deepcopy(c.state_dict()))
    assert d.memory()["disk"] == b.memory()["disk"]
    train(last, d, 5, first=15)
    assert same(weights(last), weights(plain))
    assert same(d.state_dict(), a.state_dict())


@ways
def test_a_checkpoint_is_not_larger(way):
    sizes = []
    for make in (lambda p: torch.optim.AdamW(p, 1e-2, fused=True), lambda p: remat.optimizer(p, lr=1e-2, **way)):
        model = net()
        optimizer = make(model.parameters())
        train(model, optimizer, 2)
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        sizes.append(len(saved.getvalue()))
    assert sizes[0] == sizes[1]


@ways
@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["deepcopy", "pickle"])
def test_copies_train_on_by_themselves(how, way):
    model = net()
    optimizer = remat.optimizer(groups(model), lr=1e-2, **way)
    train(model, optimizer, 5)
    other, its = how((model, optimizer))
    assert type(its) is type(optimizer)
    train(other, its, 5, first=5)
    assert its.memory()["disk"] == optimizer.memory()["disk"]
    before = weights(model)
    train(model, optimizer, 5, first=5)
    assert same(weights(model), weights(other)) and not same(before, weights(model))


@ways
def test_hooks_of_the_step_fire_once_around_it(way):
    model = net()
    torch.optim.AdamW(model.parameters())  # a plain optimizer of the same parameters exists before
    optimizer = remat.optimizer(model.parameters(), lr=1e-2, **way)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, 3)
    assert seen == ["before", "after"] * 3


@pytest.mark.parametrize("way", [AS["disk"], AS["memory"]], ids=["disk", "memory"])
def test_habits_that_need_the_gradients(way):
    def run(make):
        model = net()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for i in range(6):
            optimizer.zero_grad(set_to_none=i % 2 == 0)
            for k in range(2):
                scaler.scale(model(batch(2 * i + k)).square().mean()).backward()
            if i % 3:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

        def closure():
            optimizer.zero_grad()
            loss = model(batch(99)).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(2)]
        return weights(model), losses

    assert same(run(lambda p: remat.optimizer(p, lr=1e-2, **way)), run(lambda p: torch.optim.AdamW(p, 1e-2, fused=True)))


def test_wrapped_models():
    plain = net()
    a = torch.optim.AdamW(groups(plain), 1e-2, fused=True)
    train(plain, a)
    for way in AS.values():
        ours = remat.wrap(net(), activation_budget="100%", time_limit=2)
        b = remat.optimizer(groups(ours), lr=1e-2, **way)
        train(ours, b)
        assert same(weights(ours), weights(plain))
        assert same(b.state_dict(), a.state_dict())


def test_tied_weights_and_hooks_of_parameters():
    def run(make):
        model = net()
        model[5].weight = model[0].weight
        counted = []
        model[3].weight.register_hook(lambda grad: grad * 2)
        model[3].weight.register_post_accumulate_grad_hook(lambda p: counted.append(p.grad.sum().item()))
        train(model, make(model.parameters()), 6)
        return weights(model), counted

    expected = run(lambda p: torch.optim.AdamW(p, 1e-2, fused=True))
    for way in AS.values():
        assert same(run(lambda p: remat.optimizer(p, lr=1e-2, **way)), expected)
