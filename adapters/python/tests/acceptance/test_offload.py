# SPDX-License-Identifier: Apache-2.0
"""Activations that go to a disk and come back."""

import resource

import pytest
import torch

import remat


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) + x
        return x.square().mean()


def trained(net, steps=5):
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(2048, 128))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in net.parameters()]


def net(**options):
    torch.manual_seed(2)
    made = Net()
    return remat.wrap(made, (torch.randn(2048, 128),), cache=False, time_limit=3, **options) if options else made


def test_equal_bit_by_bit_within_both_budgets(tmp_path):
    losses, gradients = trained(net())
    for budget in ("60%", "45%"):
        model = net(activation_budget=budget, offload="activations", disk=tmp_path, disk_budget="40 MB")
        found, ours = trained(model)
        assert found == losses
        assert all(torch.equal(a, b) for a, b in zip(ours, gradients))
        memory = remat.of(model).memory()
        assert memory["planned"] <= memory["budget"]
        assert memory["disk"] <= 40_000_000
        assert not list(tmp_path.iterdir())


def test_nothing_moves_without_need(tmp_path):
    model = net(activation_budget="100%", offload="activations", disk=tmp_path)
    trained(model)
    memory = remat.of(model).memory()
    assert memory["disk"] == memory["to_disk"] == memory["from_disk"] == 0


def test_without_room_on_the_disk_it_computes_again(tmp_path):
    losses, _ = trained(net())
    model = net(activation_budget="60%", offload="activations", disk=tmp_path, disk_budget=0)
    assert trained(model)[0] == losses
    assert remat.of(model).memory()["disk"] == 0
    assert remat.of(model).plan["recomputed"] > 0


def test_options(tmp_path):
    for wrong, culprit in (({"offload": "weights"}, "offload"), ({"offload": "activations"}, "disk"), ({"disk": tmp_path}, "offload"),
                           ({"offload": "activations", "disk": tmp_path / "none"}, "none"),
                           ({"offload": "activations", "disk": tmp_path, "disk_budget": "much"}, "much")):
        model = Net()
        with pytest.raises((ValueError, remat.Error), match=culprit):
            remat.wrap(model, **wrong)
        assert not remat.is_wrapped(model)


def test_a_disk_without_room_is_named_before_the_first_step(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(remat.Error, match=str(tmp_path)):
            model = net(activation_budget="60%", offload="activations", disk=tmp_path)
            assert remat.of(model).memory()["disk"] > 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
