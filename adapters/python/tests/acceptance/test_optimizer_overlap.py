# SPDX-License-Identifier: Apache-2.0
"""Optimizers that step during the backward: freed gradients, and errors before wrong results."""

import copy
import errno
import os

import pytest
import torch

import remat
from remat import _torch
from compare import same
from optimizing import batch, net, train, weights

where = pytest.mark.parametrize("where", [{}, {"disk": "."}], ids=["memory", "disk"])


def backward(model, i=0, scale=1.0):
    (model(batch(i)).square().mean() * scale).backward()


def clip(model, optimizer):
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()


def clip_values(model, optimizer):
    backward(model)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e9)
    optimizer.step()


def divide(model, optimizer):
    backward(model)
    for p in model.parameters():
        p.grad = p.grad / 2
    optimizer.step()


def accumulate(model, optimizer):
    backward(model, 0)
    backward(model, 1)


def run_twice(model, optimizer):
    loss = model(batch(0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def scale(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(batch(0)).square().mean()).backward()
    scaler.step(optimizer)


def unscale(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(batch(0)).square().mean()).backward()
    scaler.unscale_(optimizer)
    optimizer.step()


def call_back(model, optimizer):
    optimizer.step(lambda: model(batch(0)).square().mean())


def throw_away(model, optimizer):
    backward(model)
    optimizer.zero_grad()


def throw_away_by_the_model(model, optimizer):
    backward(model)
    model.zero_grad()
    optimizer.step()


def keep_zeros(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def change_the_rate(model, optimizer):
    backward(model)
    optimizer.param_groups[0]["lr"] *= 2
    optimizer.step()


def save_between(model, optimizer):
    backward(model)
    optimizer.state_dict()


def load_between(model, optimizer):
    states = copy.deepcopy(optimizer.state_dict())
    backward(model)
    optimizer.load_state_dict(states)
    optimizer.step()


def copy_between(model, optimizer):
    backward(model)
    copy.deepcopy(optimizer)


HABITS = [clip, clip_values, divide, accumulate, run_twice, scale, unscale, call_back, throw_away, throw_away_by_the_model, keep_zeros,
          change_the_rate, save_between, load_between, copy_between]


@where
@pytest.mark.parametrize("habit", HABITS)
def test_refused_in_the_first_step_before_weights_change(habit, where):
    for options in ({}, {"fused": False}):
        model = net()
        optimizer = remat.optimizer(model.parameters(), step="overlap", lr=1e-2, **where, **options)
        with pytest.raises(remat.Refused, match="overlap") as caught:
            habit(model, optimizer)
        assert caught.value.advice
        assert same(weights(model), weights(net()))


@where
@pytest.mark.parametrize("habit", HABITS)
def test_refused_in_a_later_step(habit, where):
    model = net()
    optimizer = remat.optimizer(model.parameters(), step="overlap", lr=1e-2, **where)
    train(model, optimizer, 2)
    with pytest.raises(RuntimeError if habit is run_twice else remat.Refused, match="overlap|modified by an inplace operation"):
        habit(model, optimizer)


def test_the_same_habits_do_no_harm_after_all_gradients():
    for habit in HABITS:
        model, plain = net(), net()
        habit(model, remat.optimizer(model.parameters(), lr=1e-2))
        habit(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
        assert same(weights(model), weights(plain))


@where
def test_gradients_are_freed_as_they_come(where):
    model = net()
    optimizer = remat.optimizer(model.parameters(), step="overlap", lr=1e-2, **where)
    held = []
    first = model[0].weight
    first.register_hook(lambda grad: held.append([p.grad.untyped_storage().nbytes() if type(p.grad) is torch.Tensor else 0
                                                  for p in model[3:].parameters()]))
    train(model, optimizer, 3)
    assert all(held[0]) and not any(held[1]) and not any(held[2])  # the first step keeps all gradients until step()
    assert all(p.grad is None for p in model.parameters())


@where
def test_gradients_that_are_set_by_hand(where):
    def run(make):
        model = net()
        optimizer = make(model.parameters())
        for i in range(6):
            optimizer.zero_grad()
            gradients = torch.autograd.grad(model(batch(i)).square().mean(), list(model.parameters()))
            if i % 2:
                for p, g in zip(model.parameters(), gradients):
                    p.grad = g
            else:
                backward(model, i)
            optimizer.step()
        return weights(model)

    expected = run(lambda p: torch.optim.AdamW(p, 1e-2, fused=True))
    assert same(run(lambda p: remat.optimizer(p, lr=1e-2, step="overlap", **where)), expected)


@where
def test_other_gradients_between_backward_and_step(where):
    def run(make):
        model = net()
        optimizer = make(model.parameters())
        for i in range(4):
            backward(model[3:], i)  # a backward of the last layers only, so the first layers have not stepped
            torch.autograd.grad(model[:1](batch(i)).sum(), list(model[:1].parameters()))
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    expected = run(lambda p: torch.optim.AdamW(p, 1e-2, fused=True))
    assert same(run(lambda p: remat.optimizer(p, lr=1e-2, step="overlap", **where)), expected)


@where
@pytest.mark.parametrize("fused", [True, False])
def test_a_weight_that_the_backward_still_needs(where, fused):
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = remat.optimizer(model.parameters(), lr=1e-2, step="overlap", fused=fused, **where)
    linear = torch.nn.functional.linear

    def step():
        x = torch.randn(4, 64, requires_grad=True)
        linear(linear(x, model.weight.detach()).sin(), model.weight).sum().backward()  # the weight steps before the backward of the inner product, which needs the old weight
        optimizer.step()

    step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step()


@pytest.mark.parametrize("what", ["drain", "ready"])
@pytest.mark.parametrize("before", [0, 4])
def test_a_disk_that_fails_and_a_checkpoint_that_helps(monkeypatch, what, before):
    plain, ours = net(), net()
    a, b = torch.optim.AdamW(plain.parameters(), 1e-2, fused=True), remat.optimizer(ours.parameters(), lr=1e-2, disk=".", step="overlap")
    train(plain, a, 10)
    train(ours, b, before)
    saved = copy.deepcopy((ours.state_dict(), b.state_dict()))

    def fails(*_):
        raise remat.CopyFailed(os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(_torch.Traffic, what, fails)
        with pytest.raises(remat.CopyFailed, match="Load a checkpoint"):
            train(ours, b, 1, first=before)
    with pytest.raises((remat.CopyFailed, remat.Refused)):
        train(ours, b, 1, first=before)
    ours.load_state_dict(saved[0])
    b.load_state_dict(saved[1])
    train(ours, b, 10 - before, first=before)
    assert same(weights(ours), weights(plain))


@where
def test_a_checkpoint_after_something_was_refused(where):
    plain, ours = net(), net()
    a, b = torch.optim.AdamW(plain.parameters(), 1e-2, fused=True), remat.optimizer(ours.parameters(), lr=1e-2, step="overlap", **where)
    train(plain, a, 10)
    train(ours, b, 5)
    saved = copy.deepcopy((ours.state_dict(), b.state_dict()))
    with pytest.raises(remat.Refused):
        accumulate(ours, b)
    ours.load_state_dict(saved[0])
    b.load_state_dict(saved[1])
    train(ours, b, 5, first=5)
    assert same(weights(ours), weights(plain))


def test_a_new_optimizer_takes_parameters_over():
    plain, ours = net(), net()
    old = remat.optimizer(ours.parameters(), step="overlap", lr=1)
    torch.optim.lr_scheduler.LambdaLR(old, lambda i: 1)  # keeps the optimizer alive
    train(plain, torch.optim.AdamW(plain.parameters(), 1e-2, fused=True), 4)
    train(ours, remat.optimizer(ours.parameters(), step="overlap", lr=1e-2), 4)
    assert same(weights(ours), weights(plain))
    train(plain, torch.optim.AdamW(plain.parameters(), 1e-2, fused=True), 4)
    train(ours, remat.optimizer(ours.parameters(), lr=1e-2), 4)
    assert same(weights(ours), weights(plain))


def test_other_processes_are_refused(monkeypatch):
    model = net()
    optimizer = remat.optimizer(model.parameters(), step="overlap", lr=1e-2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(remat.Refused, match="other processes"):
        backward(model)
    assert same(weights(model), weights(net()))
    assert isinstance(optimizer, torch.optim.AdamW)
