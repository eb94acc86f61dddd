# SPDX-License-Identifier: Apache-2.0
"""Limits on the host memory that a training may use."""

import os

import pytest
import torch

import remat
from remat import _torch
from offloaded import Net, trained


def net():
    torch.manual_seed(1)
    return Net()


def test_a_budget_is_at_most_that_of_the_host(tmp_path):
    for told in ({}, {"budget": "100%"}, {"budget": 10**12}, {"activation_budget": 10**12}):
        free = remat.wrap(net(), cache=False, **told)
        losses, _ = trained(free)
        most = int(remat.of(free).memory()["planned"] * 0.8)
        model = remat.wrap(net(), cache=False, host_budget=most, **told)
        assert trained(model)[0] == losses
        memory = remat.of(model).memory()
        assert memory["planned"] <= memory["budget"] == most
        assert remat.of(model).plan["recomputed"] > 0
    with pytest.raises(remat.OverBudget, match=str(most // 10)):
        trained(remat.wrap(net(), cache=False, host_budget=most // 10))


def test_a_budget_of_the_host_that_it_does_not_have():
    for wrong in (10**15, "1000 TB"):
        with pytest.raises(ValueError, match=f"host_budget={wrong!r}.*{_torch.host_limit()}"):
            remat.wrap(net(), host_budget=wrong)
    with pytest.raises(TypeError, match="host_budget"):
        remat.wrap(net(), host_budget=True)
    with pytest.raises((ValueError, remat.Error), match="much"):
        remat.wrap(net(), host_budget="much")


def test_what_is_free_is_less_than_what_there_is():
    assert 0 < _torch.host_free() <= _torch.host_limit() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_auto(tmp_path):
    def chosen(**told):
        model = remat.wrap(torch.nn.Linear(256, 256), cache=False, offload="auto", **told)
        return remat.of(model)._options.offload

    weights = 256 * 257 * 4
    assert chosen() == "none"
    assert chosen(disk=tmp_path) == "activations"
    assert chosen(disk=tmp_path, host_budget=8 * weights) == "activations"
    assert chosen(disk=tmp_path, host_budget=8 * weights - 2) == "all"
    for told, on_disk in (({}, False), ({"disk": tmp_path}, False), ({"disk": tmp_path, "host_budget": 4 * weights}, True)):
        model = torch.nn.Linear(256, 256)
        remat.wrap(model, cache=False, offload="auto", **told)
        optimizer = remat.optimizer(model.parameters(), model=model)
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        assert (optimizer.memory()["disk"] > 0) == on_disk
