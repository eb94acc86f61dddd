# SPDX-License-Identifier: Apache-2.0
"""Compares wrapped with plain models: everything that a training loop can see is equal bit by bit."""

import collections
import copy
import dataclasses
import enum
import random
import unittest
import unittest.mock

import emulated
import torch
from torch import nn

import remat
from compare import check, copied, same, smallest
from wrapping import Chain, data, inputs


class Equal(unittest.TestCase):
    """Many models, and many ways to call them."""

    def test_chain(self):
        check(self, Chain, inputs())

    def test_convolutions(self):
        def make():
            return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
                                 nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))

        check(self, make, [((x,), {}) for x, in data((8, 3, 16, 16))])

    def test_convolutions_without_padding(self):
        for more in ({}, {"stride": 2}, {"dilation": 2}):
            check(self, lambda: nn.Sequential(nn.Conv3d(3, 8, 3, padding="valid", **more), nn.GELU(), nn.Flatten()), [((x,), {}) for x, in data((4, 3, 9, 9, 9))])

    def test_channels_last_and_strides(self):
        batches = [((x.to(memory_format=torch.channels_last),), {}) for x, in data((4, 8, 8, 8))]
        check(self, lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last), batches)
        check(self, Chain, [((x.t(),), {}) for x, in data((32, 256))])

    def test_lstm(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.2)

            def forward(self, x):
                return self.lstm(x)

        check(self, Net, [((x,), {}) for x, in data((12, 8, 16))])

    def test_attention(self):
        make = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False)
        check(self, make, [((x,), {}) for x, in data((4, 16, 32))])

    def test_nested_arguments_and_results(self):
        @dataclasses.dataclass
        class Batch:
            x: torch.Tensor
            name: str
            more: dict

        class Color(enum.Enum):
            RED = 1
            BLUE = 2

        Pair = collections.namedtuple("Pair", "left right")

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

            def forward(self, batch, pair, *rest, factor=2, color=Color.RED, flag=None, **more):
                y = self.a(batch.x).relu() * factor
                z = self.b(y + pair.left * pair.right[0]).relu()
                if color is Color.BLUE:
                    z = z * 3
                return {"pair": Pair(y, (z, [None, 1.5, "text"])), "rest": [r * 2 for r in rest], "more": more["extra"] + z.sum(),
                        "flag": flag, 3: collections.OrderedDict(a=z.detach())}

        class Batched(Net):
            pass

        a = data((256, 32), (32,), (256, 32), (3,))
        batches = [((Batch(x, "n", {"k": 1}), Pair(p, [q, "s"]), e), {"factor": 0.5, "extra": e, "color": Color.BLUE}) for x, p, q, e in a]
        model = check(self, Batched, batches)
        model.zero_grad()
        result = model(*batches[0][0], **batches[0][1])
        self.assertIsInstance(result["pair"], tuple)
        self.assertEqual(type(result["pair"]).__name__, "Pair")
        self.assertEqual((result["pair"].right[1], result["flag"]), ([None, 1.5, "text"], None))

    def test_values_among_the_arguments_are_told_apart(self):
        class Net(Chain):
            def forward(self, x, times, scale=1.0, mode="a"):
                for _ in range(times):
                    x = torch.tanh(self.layers[0](x)) * scale
                return x if mode == "a" else (x, mode)

        batches = [((x, t), {"scale": s, "mode": m}) for (x,), t, s, m in
                   zip(data((64, 32), steps=8), (1, 2, 1, True, 2, 1, 1, 2), (1, 1, 1.0, 1, 2.0, -0.0, 0.0, 1), "aababbaa")]
        check(self, Net, batches, budgets=("100% of activations",))

    def test_inputs_that_require_gradients(self):
        for x, in data((64, 32)):
            torch.manual_seed(0)
            m = Chain()
            found = []
            for wrapped in (False, True):
                torch.manual_seed(1)
                n = copy.deepcopy(m)
                if wrapped:
                    remat.wrap(n)
                y = x.clone().requires_grad_()
                z = y * 2
                (n(z) + z).square().sum().backward()
                found.append(copied([y.grad, [p.grad for p in n.parameters()]]))
            self.assertTrue(same(*found))

    def test_tied_weights(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(50, 32)
                self.mid = nn.Linear(32, 32)
                self.head = nn.Linear(32, 50, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, ids):
                return self.head(torch.tanh(self.mid(self.embed(ids))))

        g = emulated.generator(3)
        model = check(self, Net, [((torch.randint(0, 50, (16, 20), generator=g),), {}) for _ in range(3)])
        self.assertIs(model.head.weight, model.embed.weight)

    def test_buffers(self):
        class Net(Chain):
            def __init__(self):
                super().__init__()
                self.register_buffer("seen", torch.zeros(32))
                self.register_buffer("count", torch.tensor(0), persistent=False)

            def forward(self, x):
                y = super().forward(x)
                with torch.no_grad():
                    self.seen.mul_(0.9).add_(y.mean(0), alpha=0.1)
                    self.count += 1
                return y + self.seen

        check(self, Net, inputs())

    def test_frozen_and_toggled(self):
        def toggle(model, i):
            for p in model.layers[0].parameters():
                p.requires_grad_(i % 2 == 0)

        check(self, Chain, inputs(5), before=toggle)

    def test_low_rank_adapters(self):
        class Adapter(nn.Module):
            def __init__(self, base):
                super().__init__()
                self.base = base.requires_grad_(False)
                self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

            def forward(self, x):
                return self.base(x) + self.b(self.a(x))

        def make():
            m = Chain()
            for i in range(4):
                m.layers[i] = Adapter(m.layers[i])
            return m

        check(self, make, inputs())

    def test_types(self):
        check(self, lambda: Chain(dropout=0.0).double(), [((x.double(),), {}) for x, in data((64, 32))])
        check(self, lambda: Chain().bfloat16(), [((x.bfloat16(),), {}) for x, in data((64, 32))])

        def change(model, i):
            model.to((torch.float32, torch.float64)[i // 2 % 2])

        batches = [((x.to((torch.float32, torch.float64)[i // 2 % 2]),), {}) for i, (x,) in enumerate(data((64, 32), steps=6))]
        check(self, Chain, batches, budgets=("100% of activations",), before=change)

    def test_autocast(self):
        class Net(Chain):
            def forward(self, x):
                with torch.autocast(emulated.device.type, torch.bfloat16):
                    return super().forward(x)

        check(self, Net, inputs())
        for make in (Chain,):
            found = []
            for wrapped in (False, True):
                torch.manual_seed(0)
                m = make()
                if wrapped:
                    remat.wrap(m, budget="90% of activations", time_limit=5)
                for (x,), _ in inputs():
                    with torch.autocast(emulated.device.type, torch.bfloat16):
                        y = m(x)
                    y.float().sum().backward()
                    with torch.no_grad():
                        m(x)
                    found.append(copied([y, [p.grad for p in m.parameters()]]))
            self.assertTrue(same(found[:3], found[3:]))

    def test_attributes_are_told_apart(self):
        def change(model, i):
            model.scale = float(i // 2)
            model.dropout.p = 0.1 * (i % 2)
            model.norm.eval() if i == 3 else model.norm.train()

        check(self, Chain, inputs(6), before=change, budgets=("100% of activations",))

    def test_configurations_are_told_apart(self):
        class Net(Chain):
            def __init__(self):
                super().__init__()
                self.config = type("Config", (), {})()
                self.config.power = 1
                self.settings = {"on": [True]}

            def forward(self, x):
                y = super().forward(x) ** self.config.power
                return y if self.settings["on"][0] else -y

        def change(model, i):
            model.config.power = 1 + i % 2
            model.settings["on"][0] = i < 3

        check(self, Net, inputs(5), before=change, budgets=("100% of activations",))

    def test_attributes_of_every_kind_are_told_apart(self):
        class Slotted:
            __slots__ = ("value",)

        class Scale:
            def __init__(self):
                self.value = 1.0

        class Double(Scale):
            pass

        class Half(Scale):
            pass

        class Number(float):
            factor = 1.0

            def __repr__(self):
                return f"{self.factor} times {float(self)}"

        class Net(Chain):
            def __init__(self):
                super().__init__()
                self.order = collections.OrderedDict(a=1.0, b=2.0)
                self.chosen = {"a", "b"}
                self.nested = ({"list": [1.0, (2.0, [3.0])]},)
                self.counts = collections.defaultdict(float, a=1.0)
                self.slotted = Slotted()
                self.slotted.value = 1.0
                self.object = Double()
                self.number = Number(1.0)
                self.generator = random.Random(1)
                self.table = torch.ones(3)
                self.function = lambda: None
                self.function.value = 1.0
                self.bound = Scale.__init__.__get__(self.object)
                self.by_number = {1: 1.0, (2, 3): 2.0}
                self.flag = False

            def forward(self, x):
                scale = next(iter(self.order.values())) + len(self.chosen) + self.nested[0]["list"][1][1][0] + self.counts["a"]
                scale += self.slotted.value + self.object.value * (2 if type(self.object) is Double else 0.5) + self.number.factor
                scale += random.Random(self.generator.getstate()[1][0]).random() + self.table.dim() + self.function.value
                scale += getattr(self.bound, "value", 0.0) + self.by_number[1] + (0.5 if self.flag is False else 0.25)
                return super().forward(x) * scale

        changes = [
            lambda m: m.order.move_to_end("a"), lambda m: m.order.__setitem__("b", 5.0), lambda m: m.chosen.discard("a"),
            lambda m: m.nested[0]["list"][1][1].__setitem__(0, -3.0), lambda m: m.counts.__setitem__("a", 2.0),
            lambda m: setattr(m.slotted, "value", 2.0), lambda m: setattr(m.object, "value", 3.0),
            lambda m: setattr(m.object, "__class__", Half), lambda m: setattr(m.object, "__dict__", {"value": 4.0}),
            lambda m: setattr(m.number, "factor", 2.0), lambda m: m.generator.seed(2), lambda m: setattr(m, "table", torch.ones(3, 1)),
            lambda m: m.table.resize_(9), lambda m: setattr(m.function, "value", 3.0), lambda m: m.by_number.__setitem__(1, -0.0),
            lambda m: setattr(m, "flag", 0), lambda m: setattr(Scale.__init__, "value", 7.0),
        ]

        def change(model, i):
            if i == 0:
                vars(Scale.__init__).clear()
            if i % 3 == 2:
                changes[i // 3](model)

        check(self, Net, inputs(3 * len(changes)), before=change, budgets=("100% of activations",))

    def test_what_has_not_changed_is_not_read_again(self):
        class Net(Chain):
            def __init__(self):
                super().__init__()
                self.step = 1000000
                self.lstm = nn.LSTM(32, 32)

            def forward(self, x):
                return self.lstm(super().forward(x))[0]

        m = remat.wrap(Net(), follow=False)
        (x,), _ = inputs()[0]
        for _ in range(2):
            m(x).sum().backward()
        with unittest.mock.patch.object(remat._snapshot, "settings", side_effect=AssertionError("read again")):
            for _ in range(3):
                m.step = int("1000000")  # a new object with the same value
                m(x).sum().backward()
                m.zero_grad()

    def test_modules_are_told_apart(self):
        def change(model, i):
            if i == 1:
                model.layers[1] = nn.Linear(32, 32)
            if i == 2:
                model.layers.append(nn.Linear(32, 32))
            if i == 3:
                model.norm = nn.LayerNorm(32)
            if i == 4:
                model.layers[2].weight = model.layers[3].weight
            if i == 5:
                model.layers[0].forward = lambda x: x * 2
            if i == 6:
                model.layers[0].forward = lambda x: x * 3

        check(self, Chain, inputs(7), before=change, budgets=("100% of activations",))

    def test_questions_about_the_inputs(self):
        class Net(Chain):
            def forward(self, x, mask):
                if mask.all():
                    return super().forward(x)
                if (mask.sum() > 250).item():
                    return super().forward(x) * mask[:, None] + int(mask[0])
                return super().forward(x * 2) * mask[:, None]

        masks = [torch.ones(256, dtype=torch.long) for _ in range(6)]
        masks[1][3] = masks[3][0] = 0
        masks[2][10:100] = 0
        check(self, Net, [((x, mask), {}) for (x,), mask in zip(data((256, 32), steps=6), masks)], budgets=("100% of activations",))

    def test_shapes(self):
        sizes = (64, 32, 64, 48, 32, 7)
        check(self, Chain, [((torch.randn(n, 32),), {}) for n in sizes], budgets=("100% of activations",))

    def test_checkpoint_inside(self):
        from torch.utils.checkpoint import checkpoint

        class Net(Chain):
            reentrant = False

            def part(self, act, x):
                return checkpoint(act, x, use_reentrant=self.reentrant)

            def forward(self, x):
                x = self.layers[0](x)
                for layer in self.layers:
                    x = self.part(lambda y, layer=layer: self.dropout(torch.tanh(layer(y).relu_())), x)
                return self.norm(x)

        class Plain(Net):
            def part(self, act, x):
                return act(x)

        check(self, Net, inputs())
        # The planner decides about recomputation, not the model: both models have the same plan and the same smallest budget.
        made = [remat.wrap(kind(), *inputs()[0], budget="100% of activations") for kind in (Net, Plain)]
        operations = [remat.of(m).plan["operations"] for m in made]
        self.assertEqual(operations[0], operations[1])
        self.assertEqual(remat.of(made[0]).plan["recomputed"], 0)
        self.assertEqual(remat.of(made[0]).memory()["arena"], remat.of(made[1]).memory()["arena"])
        self.assertEqual(*(smallest(kind, inputs()) for kind in (Net, Plain)))
        Net.reentrant = True
        check(self, Net, inputs())


if __name__ == "__main__":
    unittest.main()
