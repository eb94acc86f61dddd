# SPDX-License-Identifier: Apache-2.0
"""Activations that are offloaded to a disk and prefetched."""

import copy
import resource

import pytest
import torch

import remat
from offloaded import Net, in_files, net, trained


def test_equal_bit_by_bit_within_both_budgets(tmp_path):
    losses, gradients = trained(net())
    for budget, offload in (("60%", "activations"), ("45%", "activations"), ("45%", "all")):
        model = net(activation_budget=budget, offload=offload, disk=tmp_path, disk_budget="40 MB")
        found, ours = trained(model)
        assert bool(in_files(model, tmp_path)) == (offload == "all")
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
    for wrong, culprit in (({"offload": "weights"}, "offload"), ({"weights": "here"}, "weights must be"),
                           ({"offload": "activations", "disk": tmp_path, "weights": "planned"}, "weights"), ({"offload": "all"}, "disk"), ({"offload": "optimizer"}, "disk"), ({"offload": "activations"}, "disk"), ({"disk": tmp_path}, "offload"),
                           ({"offload": "activations", "disk": tmp_path / "none"}, "none"),
                           ({"offload": "activations", "disk": tmp_path, "disk_budget": "much"}, "disk_budget.*much"),
                           ({"offload": "all", "disk": f"{tmp_path}/\0cut"}, "disk must be a folder"), ({"offload": "all", "disk": ""}, "disk must be a folder")):
        model = Net()
        with pytest.raises((ValueError, remat.Error), match=culprit):
            remat.wrap(model, **wrong)
        assert not remat.is_wrapped(model)


def test_a_relative_folder_stays_the_same(tmp_path, monkeypatch):
    """A relative folder is resolved once. Later files of plans and optimizers go there, even if the working directory changes."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "elsewhere").mkdir()
    model = net(activation_budget="60%", offload="all", disk="disk")
    optimizer = remat.optimizer(model.parameters(), disk="disk")
    monkeypatch.chdir("elsewhere")
    remat.of(model).set_budget(activation_budget="45%")
    for _ in range(2):
        model(torch.randn(1024, 128)).backward()
        optimizer.step()
    copied = copy.deepcopy(model)
    copied(torch.randn(1024, 128)).backward()
    for found in (model, copied):
        assert len(in_files(found, tmp_path / "disk")) == 12
    assert optimizer.memory()["disk"] > 0


def test_a_disk_without_room_is_named_before_the_first_step(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(remat.Error, match=str(tmp_path)):
            model = net(activation_budget="60%", offload="activations", disk=tmp_path)
            assert remat.of(model).memory()["disk"] > 0
        with pytest.raises(remat.NoSpace, match=f"{tmp_path}.*File too large"):  # the error is the limit on file sizes, not a full disk
            remat.wrap(Net(), offload="all", disk=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
