# SPDX-License-Identifier: Apache-2.0
"""Gradients in files on a disk."""

import copy
import errno
import os

import pytest
import torch
from compare import same

import remat
from gradients_in_hooks import batch, leaves, net, train
from offloaded import in_files
from remat import _torch
from test_optimizer_disk import resident


def fit(model, optimizer, steps=5, micro=1, clip=None, first=0):
    losses = []
    for i in range(first, first + steps):
        optimizer.zero_grad()
        for k in range(micro):
            loss = model(batch(10 * i + k)).square().mean() / micro
            loss.backward()
            losses.append(loss.item())
        if clip:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("told", [{}, {"micro": 3}, {"clip": 0.1}, {"micro": 2, "clip": 0.1}], ids=str)
def test_gradients_in_files_are_ordinary(tmp_path, told):
    plain, wrapped = net(), net()
    theirs = torch.optim.AdamW(plain.parameters(), 1e-2, fused=True)
    expected = fit(plain, theirs, **told)
    remat.wrap(wrapped, offload="all", disk=tmp_path, cache=False)
    optimizer = remat.optimizer(wrapped.parameters(), lr=1e-2, model=wrapped)
    assert fit(wrapped, optimizer, **told) == expected
    assert same(list(wrapped.parameters()), list(plain.parameters()))
    assert leaves(wrapped)
    large = [p for p in wrapped.parameters() if p.nbytes >= 4096]
    disk = remat.of(wrapped)._gradients.disk
    assert all(disk.holds(p.grad) for p in large)
    assert remat.of(wrapped).memory()["gradients"] == sum(p.nbytes for p in large)
    memory = remat.of(wrapped).memory()
    assert memory["held"] < sum(p.nbytes for p in large)  # neither weights nor gradients count as held
    remat.unwrap(wrapped)
    assert fit(wrapped, optimizer, first=5, **told) == fit(plain, theirs, first=5, **told)


@pytest.mark.parametrize("step", ["after", "overlap"])
def test_memory_that_is_short(tmp_path, monkeypatch, step):
    plain, wrapped = net(), net()
    expected = fit(plain, torch.optim.AdamW(plain.parameters(), 1e-2, fused=True), 6)
    remat.wrap(wrapped, offload="all", disk=tmp_path, cache=False)
    optimizer = remat.optimizer(wrapped.parameters(), lr=1e-2, model=wrapped, step=step)
    found = fit(wrapped, optimizer, 2)
    weights = sum(p.nbytes for p in wrapped.parameters() if p.nbytes >= 4096)
    assert resident(tmp_path)[0] >= weights
    live = remat.of(wrapped).memory()["live"]
    with monkeypatch.context() as short:
        short.setattr(_torch, "host_free", lambda: 0)
        found += fit(wrapped, optimizer, 2, first=2)
    memory = remat.of(wrapped).memory()
    assert resident(tmp_path)[0] == 0
    assert step == "overlap" or live - memory["live"] > memory["arena"] // 2 > 0
    assert found + fit(wrapped, optimizer, 2, first=4) == expected
    assert resident(tmp_path)[0] >= weights
    assert same(list(wrapped.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_an_overlapped_optimizer(tmp_path, optimizer_first):
    plain, wrapped = net(), net()
    expected = fit(plain, torch.optim.AdamW(plain.parameters(), 1e-2, fused=True))
    make = lambda: remat.optimizer(wrapped.parameters(), lr=1e-2, disk=tmp_path, step="overlap")
    optimizer = make() if optimizer_first else None
    remat.wrap(wrapped, offload="all", disk=tmp_path, cache=False)
    optimizer = optimizer or make()
    assert fit(wrapped, optimizer) == expected
    assert same(list(wrapped.parameters()), list(plain.parameters()))
    assert leaves(wrapped)
    assert all(p.grad is None for p in wrapped.parameters())


def test_an_overlapped_optimizer_without_a_disk():
    plain, wrapped = net(), net()
    expected = fit(plain, torch.optim.AdamW(plain.parameters(), 1e-2, fused=True))
    remat.wrap(wrapped, cache=False)
    assert fit(wrapped, remat.optimizer(wrapped.parameters(), lr=1e-2, step="overlap")) == expected
    assert leaves(wrapped)


def test_a_gradient_that_somebody_holds_is_not_written_over(tmp_path):
    model = remat.wrap(net(), offload="all", disk=tmp_path, cache=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    held = []
    for i in range(4):
        optimizer.zero_grad()
        model(batch(i)).square().mean().backward()
        weight = model[0][0].weight
        held.append((weight.grad, weight.grad.clone()))
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in held) and not torch.equal(held[0][0], held[1][0])
    assert len({a.data_ptr() for a, _ in held}) == 4
    reserved = remat.of(model).memory()["gradients"]
    held.clear()
    fit(model, optimizer, 3)
    assert remat.of(model).memory()["gradients"] < reserved


class Several(torch.nn.Module):
    """A model with two outputs. The test's loss uses one of them, which remat learns when the backward begins."""

    def __init__(self):
        super().__init__()
        self.net = net(256, 6)

    def forward(self, x):
        y = self.net(x)
        return y.square().mean(), y


def test_a_forward_that_runs_once_more(tmp_path):
    plain, wrapped = Several(), Several()
    run = lambda model: [model(batch(i, 256))[0].backward() for i in range(3)]
    run(plain)
    weights = sum(p.nbytes for p in wrapped.parameters())
    remat.wrap(wrapped, budget=weights * 3 // 4, offload="all", disk=tmp_path, cache=False)
    run(wrapped)
    assert same([p.grad for p in wrapped.parameters()], [p.grad for p in plain.parameters()]) and leaves(wrapped)


def test_a_disk_that_fails(tmp_path, monkeypatch):
    """If a copy to the disk fails, the backward raises, so no step uses a lost gradient. The next backward may succeed."""
    plain, wrapped = net(), net()
    remat.wrap(wrapped, offload="all", disk=tmp_path, cache=False)

    def fail(traffic):
        traffic.wait()
        raise remat.CopyFailed(os.strerror(errno.EIO))

    backward = lambda model: model(batch(0)).square().mean().backward()
    with monkeypatch.context() as broken:
        broken.setattr(_torch.Traffic, "drain", fail)
        with pytest.raises((remat.CopyFailed, RuntimeError), match=os.strerror(errno.EIO)):
            backward(wrapped)
    wrapped.zero_grad()
    for model in (plain, wrapped):
        backward(model)
    assert same([p.grad for p in wrapped.parameters()], [p.grad for p in plain.parameters()])


def test_what_is_trained_later(tmp_path):
    """Parameters that are unfrozen later, and a later change of the type of the model."""
    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for p in model[0].parameters():
            p.requires_grad_(False)
        losses = fit(model, optimizer, 2)
        for p in model[0].parameters():
            p.requires_grad_(True)
        losses += fit(model, optimizer, 2)
        model.double()
        for i in range(2):
            optimizer.zero_grad()
            loss = model(batch(i).double()).square().mean()
            loss.backward()
            losses.append(loss.item())
        return losses

    plain, wrapped = net(), net()
    remat.wrap(wrapped, offload="all", disk=tmp_path, cache=False)
    assert run(wrapped) == run(plain)
    assert same([p.grad for p in wrapped.parameters()], [p.grad for p in plain.parameters()]) and leaves(wrapped)
    assert all(remat.of(wrapped)._gradients.disk.holds(layer[0].weight.grad) for layer in wrapped)


def test_a_copy_has_gradients_of_its_own(tmp_path):
    model = remat.wrap(net(), offload="all", disk=tmp_path, cache=False)
    fit(model, torch.optim.SGD(model.parameters(), 1e-2), 2)
    other = copy.deepcopy(model)
    fit(other, torch.optim.SGD(other.parameters(), 1e-2), 2)
    assert remat.of(other)._gradients.disk.holds(other[0][0].weight.grad)
    assert not remat.of(model)._gradients.disk.holds(other[0][0].weight.grad)


def test_no_room_for_gradients(tmp_path):
    model = net()
    with pytest.raises(remat.NoSpace, match="disk_budget=4096"):
        remat.wrap(model, offload="all", disk=tmp_path, disk_budget=4096)
    assert not remat.is_wrapped(model) and not in_files(model, tmp_path)
    train(model, 1)
    assert type(model[0][0].weight.grad) is torch.Tensor


def test_the_budget_may_be_less_than_weights_and_gradients(tmp_path):
    """Weights and gradients are in files, so the budget does not count them as held."""
    wide = lambda: net(512, 6)
    plain, wrapped = wide(), wide()
    run = lambda model: [(loss := model(batch(i, 512)).square().mean(), loss.backward())[0].item() for i in range(2)]
    expected, weights = run(plain), sum(p.nbytes for p in wrapped.parameters())
    remat.wrap(wrapped, budget=weights // 2, offload="all", disk=tmp_path, cache=False)
    assert run(wrapped) == expected
    assert same([p.grad for p in wrapped.parameters()], [p.grad for p in plain.parameters()])
    remat.of(wrapped).reset_peak()
    run(wrapped)
    memory = remat.of(wrapped).memory()
    assert memory["planned"] <= memory["budget"] < weights
    assert memory["peak"] <= memory["planned"] + 4 * 64 * 512 * 4  # tensors of the loss, and the next batch


def test_many_steps_do_not_grow(tmp_path):
    model = remat.wrap(net(64, 2), offload="all", disk=tmp_path, cache=False)
    optimizer = remat.optimizer(model.parameters(), lr=1e-3, model=model)

    def held():
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(list(maps))

    counts = []
    for k in range(300):
        optimizer.zero_grad()
        model(batch(k, 64)).square().mean().backward()
        optimizer.step()
        if k in (20, 299):
            counts.append(held())
    assert counts[1][0] <= counts[0][0] and counts[1][1] <= counts[0][1] + 1 and counts[1][2] <= counts[0][2] + 20
