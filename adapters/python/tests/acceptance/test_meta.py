# SPDX-License-Identifier: Apache-2.0
"""Models on `meta` have no data. Their plans by a roofline equal those of the same models on the host."""

import pytest
import torch

import remat

DEVICE = remat.Roofline({torch.float32: 50e12, torch.bfloat16: 400e12}, 2e12, 3e-6)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=64, n_head=4, n_positions=64, vocab_size=300))
    ids = torch.zeros(2, 32, dtype=torch.long)
    return net, {"input_ids": ids, "labels": ids, "use_cache": False}


def resnet18():
    from torchvision.models import resnet18 as make

    return make(num_classes=10), {"x": torch.zeros(16, 3, 64, 64)}


def made(make, device):
    with torch.device(device):
        return make()


@pytest.mark.parametrize("make", [gpt2, resnet18])
@pytest.mark.parametrize("budget", [None, "80%"])
def test_meta_is_planned_as_the_host_is(make, budget):
    plans = []
    for where in ("cpu", "meta"):
        model, inputs = made(make, where)
        before = [(n, t, t.device) for n, t in model.state_dict(keep_vars=True).items()]
        plans.append(remat.plan(model, kwargs=inputs, budget=budget, time_limit=3, device=DEVICE))
        assert all(t is u and t.device == d for (_, t, d), u in zip(before, model.state_dict(keep_vars=True).values()))
    host, meta = plans
    for figure in ("plain_seconds", "smallest_bound", "inputs"):
        assert meta[figure] == host[figure], figure
    if budget is None:
        assert meta == host and meta["recomputed"] == 0
    else:
        assert meta["status"] in ("optimal", "feasible") and meta["recomputed"] > 0
        assert abs(meta["seconds"] / host["seconds"] - 1) < 0.02  # results of timed searches vary


def test_a_model_larger_than_any_machine():
    n, rows = 2**18, 8
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(n, n, False), torch.nn.ReLU(), torch.nn.Linear(n, n, False)).bfloat16()
        x = torch.empty(rows, n, dtype=torch.bfloat16)
    found = remat.plan(model, (x,), device=DEVICE)
    weight = 2 * n * n
    # Five products: two in the forward; in the backward two for weights and one in between. The time of each is that of one access to a weight.
    assert 5 * weight / 2e12 < found["plain_seconds"] < 5.01 * weight / 2e12
    assert 4 * weight < found["peak"] < 4.01 * weight


def test_curve():
    model, inputs = made(gpt2, "meta")
    found = remat.curve(model, kwargs=inputs, points=4, time_limit=2, device=DEVICE)
    assert found.plain_seconds > 0 and any(p["seconds"] and p["seconds"] > found.plain_seconds for p in found.points)


def test_refusals():
    class Asks(torch.nn.Linear):
        def forward(self, x, n):
            return super().forward(x) * n.sum().item()

    class Reads(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + float(self.bias.detach().numpy()[0])

    x, n = torch.empty(2, 4, device="meta"), torch.ones(2, dtype=torch.long, device="meta")
    with pytest.raises(remat.Refused, match="_local_scalar_dense"):
        remat.plan(Asks(4, 4, device="meta"), (x, n), device=DEVICE)
    with pytest.raises(remat.Refused, match="reads the memory"):
        remat.plan(Reads(4, 4, device="meta"), (x,), device=DEVICE)
    linear = torch.nn.Linear(4, 4, device="meta")
    for refused in (remat.plan, remat.wrap):
        with pytest.raises(remat.Refused, match="meta"):
            refused(linear, (x,))
    with pytest.raises(ValueError, match="'cuda' is unknown"):
        remat.plan(linear, (x,), device="cuda")
    with pytest.raises(TypeError, match="Roofline"):
        remat.plan(linear, (x,), device=torch.device("cuda"))
    for wrong in (0, -1.0, float("nan"), {}, {torch.float32: 0}):
        with pytest.raises(ValueError, match="flops_per_second"):
            remat.Roofline(wrong, 1e12)
    with pytest.raises(ValueError, match="overhead"):
        remat.Roofline(1e12, 1e12, -1)
