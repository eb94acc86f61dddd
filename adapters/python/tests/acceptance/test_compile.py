# SPDX-License-Identifier: Apache-2.0
"""torch.compile does not trace wrapped models."""

import pytest
import torch
import torch._dynamo
from differential import assert_same, train
from test_module import Net, batches, made, wrapped
from torch import nn

import remat


class Graphs:
    """A backend of torch.compile that runs graphs unchanged, and keeps them."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph, inputs):
        self.seen.append(graph)
        return graph.forward

    def operations(self):
        return [str(node.target) for graph in self.seen for node in graph.graph.nodes if node.op.startswith("call")]


def test_compile_of_a_wrapped_model():
    torch._dynamo.reset()
    backend = Graphs()
    model = wrapped()
    compiled = torch.compile(model, backend=backend)
    assert_same(train(made(), batches()), [s._replace(gradients=strip(s.gradients), state=strip(s.state))
                                           for s in train(compiled, batches())])
    assert remat.of(model).plan["recomputed"] > 0
    assert not backend.operations()


def strip(named):
    return {n.removeprefix("_orig_mod."): v for n, v in named.items()}


def test_module_compile():
    torch._dynamo.reset()
    backend = Graphs()
    model = wrapped()
    model.compile(backend=backend)
    assert_same(train(made(), batches()), train(model, batches()))
    assert remat.of(model).plan["recomputed"] > 0
    assert not backend.operations()


class Outer(nn.Module):
    """A model with computations around a wrapped part."""

    def __init__(self, part):
        super().__init__()
        self.part, self.scale = part, nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (self.part(x + 1) * self.scale).sin()


def test_wrapped_part_of_a_compiled_model():
    torch._dynamo.reset()
    backend = Graphs()
    part = wrapped()
    compiled = torch.compile(Outer(part), backend=backend)
    plain = train(Outer(made()), batches(6))
    steps = train(compiled, batches(6))
    assert_same(plain, [s._replace(gradients=strip(s.gradients), state=strip(s.state)) for s in steps])
    assert remat.of(part).plan["recomputed"] > 0
    assert backend.operations() and len(backend.seen) <= 4
    assert not any("linear" in o for o in backend.operations())


def test_compiled_part_of_a_wrapped_model(caplog):
    """With on_refuse="raise" an error names the compiled part. By default a warning names it, and the model trains unplanned."""

    def make():
        torch._dynamo.reset()
        model = made()
        model.second = torch.compile(model.second, backend="aot_eager")
        return model

    with pytest.raises(remat.Refused, match="module second inside is compiled") as refused:
        remat.wrap(make(), budget="60% of activations", time_limit=1, gap=0.9, on_refuse="raise")(*batches()[0])
    assert "torch.compile" in refused.value.advice
    plain = train(make(), batches())
    assert_same(plain, train(wrapped(model=make()), batches()))
    assert "module second inside is compiled" in caplog.text


def test_wrap_of_a_compiled_model():
    compiled = torch.compile(Net(), backend="eager")
    try:
        remat.wrap(compiled)
    except remat.Refused as e:
        assert "wrap the module" in f"{e} {e.advice}"
    else:
        raise AssertionError("neither the module nor a refusal")
