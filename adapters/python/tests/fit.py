# SPDX-License-Identifier: Apache-2.0
"""Compares `remat.fit` and `remat.largest` with training: sizes, peaks and verdicts about budgets."""
import contextlib
import copy
import io
import json
import math
import pathlib
import tempfile
import unittest

import torch
from torch import nn

import remat
from remat import __main__ as program
from remat import _cards, _fit, _torch

_fit._SHORT = 0.1  # seconds of a search; enough for these small models
DEVICE = remat.Roofline(1e11, 1e10)


class Net(nn.Module):
    """A few blocks with more bytes of activations than of weights."""

    def __init__(self, width=48, depth=6):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                                    for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x, labels):
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def arguments(n=8, rows=64):
    return torch.randn(n, rows, 48), torch.randint(10, (n, rows))


def on_meta(tensors):
    return tuple(t.to("meta") for t in tensors)


def trained_peak(model, args, budget):
    """Memory figures after three wrapped steps, in bytes, held memory included."""
    model = remat.wrap(copy.deepcopy(model), budget=budget, cache=False, planner=remat.Planner(time_limit=10, first_limit=2))
    for step in range(3):
        if step == 1:
            remat.of(model).reset_peak()  # the profile of the first step needs extra memory
        for p in model.parameters():
            p.grad = None
        model(*args).backward()
    memory = remat.of(model).memory()
    remat.unwrap(model)
    return memory


def made():
    return Net(), on_meta(arguments())


def made_with_names():
    x, labels = on_meta(arguments())
    return Net().to("meta"), {"x": x, "labels": labels}


class Noise(nn.Module):
    """Random numbers of every kind, in the shape of the input."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = nn.functional.dropout(x * self.scale, 0.1) + torch.rand_like(x) * torch.randn_like(x)
        return (x * torch.empty_like(x).normal_() * torch.empty_like(x).uniform_(-1, 1)).sum()


def not_a_model():
    return 3


def raises():
    raise KeyError("weights")


def leaves():
    raise SystemExit(0)


def made_without_gradients():
    return nn.Linear(4, 4).requires_grad_(False), (torch.randn(2, 4),)


def made_with_wrong_arguments():
    return nn.Linear(4, 4), (torch.randn(2, 3),)


class Fit(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.manual_seed(0)
        cls.model, cls.args = Net(), arguments()
        cls.found = remat.fit(cls.model, cls.args, device=DEVICE, optimizer="adamw", budget="1 GiB")
        cls.without_states = remat.fit(cls.model, cls.args, device=DEVICE, budget="1 GiB")

    def test_sizes(self):
        weights = sum(p.nbytes for p in self.model.parameters())
        optimizer = torch.optim.AdamW(copy.deepcopy(self.model).parameters())
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        states = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
        self.assertEqual(_cards.optimizer_bytes(torch.optim.AdamW, self.model), states)
        self.assertEqual(self.found.sizes["gradients"], weights)
        self.assertEqual(self.found.sizes["optimizer"], states)
        self.assertGreaterEqual(self.found.sizes["parameters"], weights)
        self.assertLess(self.found.sizes["parameters"], weights * 1.01)
        self.assertGreaterEqual(self.found.sizes["inputs"], sum(t.nbytes for t in self.args))

    def test_the_same_on_meta(self):
        other = remat.fit(copy.deepcopy(self.model).to("meta"), on_meta(self.args), device=DEVICE, optimizer="adamw", budget="1 GiB")
        self.assertEqual((other.sizes, other.eager_peak, other.smallest_bound), (self.found.sizes, self.found.eager_peak, self.found.smallest_bound))
        self.assertEqual(other.points[0], self.found.points[0])

    def test_draws_that_no_memory_could_hold(self):
        """The capture of a model on meta runs no kernels, not even random ones."""
        with torch.device("meta"):
            step = remat.plan(Noise(), (torch.empty(1 << 40),), device=DEVICE)
        self.assertGreater(step.peak, 1 << 42)

    def test_peak_of_eager_mode(self):
        _torch.meter_install()
        model, args = copy.deepcopy(self.model), self.args
        before = _torch.meter_reset()
        model(*args).backward()
        measured = _torch.meter_peak() - before
        sizes = self.without_states.sizes
        estimate = self.without_states.eager_peak - sizes["parameters"] - sizes["inputs"] - sizes["buffers"]
        self.assertLess(abs(estimate - measured), 0.05 * measured)

    def test_points(self):
        points = self.found.points
        self.assertEqual([p.name for p in points],
                         ["no recomputation", "at most 5 % extra time", "at most 10 % extra time", "at most 20 % extra time"])
        for point, most in zip(points, (0, 0.05, 0.1, 0.2)):
            self.assertLessEqual(point.extra, most)
        self.assertEqual([p.peak for p in points], sorted((p.peak for p in points), reverse=True))
        self.assertLess(points[-1].peak, points[0].peak)
        self.assertLessEqual(self.found.smallest_bound, self.found.smallest)
        self.assertLessEqual(self.found.smallest, points[-1].peak)

    def test_no_worse_than_schedules_that_are_known(self):
        """The result is no worse than known schedules, whatever the shape of the curve between them."""
        for power in (0.3, 1, 3, 10, 30):
            def planned(limit, name, power=power):
                return _fit.FitPoint(name, limit, (1 - limit / 1000) ** power, 0)

            known = [(peak, planned(peak, "").extra) for peak in range(1000, 0, -90)]
            for share in (0.01, 0.05, 0.1, 0.2, 0.5):
                with self.subTest(power=power, share=share):
                    best = _fit._cheapest(share, known, planned(1000, ""), 10, planned)
                    self.assertLessEqual(best.extra, share)
                    self.assertLessEqual(best.peak, min(peak for peak, extra in known if extra <= share))

    def test_rates_by_name(self):
        args = on_meta(arguments())
        for device in ("t4", remat.card("t4"), remat.card("t4").roofline):
            self.assertEqual(remat.plan(Net().to("meta"), args, device=device).seconds, remat.plan(Net().to("meta"), args, device="t4").seconds)
        with self.assertRaisesRegex(ValueError, "abacus"):
            remat.plan(Net().to("meta"), args, device="abacus")
        with self.assertRaisesRegex(TypeError, "must be a name such as"):
            remat.curve(Net().to("meta"), args, device=3)

    def test_training_takes_what_was_told(self):
        found = self.without_states
        within = 1.01  # searches for the smallest budget end there
        for budget in (found.points[0].peak, found.points[-1].peak, int(within * found.smallest)):
            memory = trained_peak(self.model, self.args, budget)
            self.assertLessEqual(memory["planned"], budget)
            self.assertLessEqual(memory["peak"], budget)
        with self.assertRaises(remat.OverBudget):
            remat.plan(self.model, self.args, budget=found.smallest_bound - 1, device=DEVICE, time_limit=1)

    def test_steps_take_what_is_planned_to_the_byte(self):
        """The peak differs from the plan by at most 128 bytes: plans round the loss and its gradient up to 64 bytes each."""
        _torch.meter_install()
        for model in (self.model, nn.Sequential(*(nn.Sequential(nn.Linear(48, 192), nn.Dropout(0.1), nn.GELU(), nn.Linear(192, 48)) for _ in range(4)))):
            for share in (100, 60):
                model, args = copy.deepcopy(model), self.args[:2 if isinstance(model, Net) else 1]
                remat.wrap(model, budget=f"{share}% of activations", cache=False, planner=remat.Planner(time_limit=1))
                for step in range(3):
                    model.zero_grad()
                    if step == 2:
                        remat.of(model).release()
                        before = _torch.meter_reset()
                    model(*args).sum().backward()
                added, memory = _torch.meter_peak() - before, remat.of(model).memory()
                remat.unwrap(model)
                with self.subTest(type(model).__name__, share=share):
                    self.assertLessEqual(added, memory["planned"] - memory["held"])
                    self.assertLessEqual(memory["planned"] - memory["held"] - added, 128)

    def test_verdicts(self):
        found = self.without_states
        self.assertTrue(found.fits)
        self.assertIn("plain step fits", found.verdict)
        # Searches of another table stop at other times, so the choice is flexible: the budget of one row admits a plan of the next row.
        tight = remat.fit(self.model, self.args, device=DEVICE, budget=found.points[-2].peak, extra=0.25)
        self.assertTrue(tight.fits)
        self.assertLessEqual(tight.chosen.peak, tight.budget)
        self.assertIn(f"budget={tight.budget}", tight.verdict)
        slow = remat.fit(self.model, self.args, device=DEVICE, budget=found.points[-1].peak, extra=0.001)
        self.assertFalse(slow.fits)
        self.assertIsNotNone(slow.chosen)
        never = remat.fit(self.model, self.args, device=DEVICE, budget=found.smallest_bound - 1)
        self.assertFalse(never.fits)
        self.assertIsNone(never.chosen)
        self.assertIn("does not fit", never.verdict)

    def test_documents(self):
        document = json.loads(self.found.json())
        self.assertEqual(document["sizes"], self.found.sizes)
        self.assertEqual(document["fits"], self.found.fits)
        self.assertIn("<table>", self.found._repr_html_())
        for text in ("parameters", "at most 5 % extra time", self.found.verdict):
            self.assertIn(text, str(self.found))
        with tempfile.TemporaryDirectory() as folder:
            self.found.save(pathlib.Path(folder) / "fit.json")
            self.assertEqual(json.loads((pathlib.Path(folder) / "fit.json").read_text()), document)
            self.assertEqual([p.name for p in pathlib.Path(folder).iterdir()], ["fit.json"])

    def test_the_device_at_hand(self):
        for model, args in ((self.model, self.args), (copy.deepcopy(self.model).to("meta"), on_meta(self.args))):
            found = remat.fit(model, args)
            self.assertEqual((found.device, found.reserved), ("cpu", 0))
            self.assertGreater(found.seconds, 0)
            self.assertTrue(found.fits)

    def test_model_stays_as_it_is(self):
        model = Net().train()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        state = torch.get_rng_state()
        remat.fit(model, self.args, device=DEVICE, budget="1 GiB")
        self.assertTrue(torch.equal(state, torch.get_rng_state()))
        self.assertFalse(remat.is_wrapped(model))
        self.assertTrue(all(torch.equal(before[name], t) for name, t in model.state_dict().items()))
        self.assertTrue(all(p.grad is None for p in model.parameters()))

    def test_bad_input(self):
        for options, error, words in (({"device": "h1000"}, ValueError, "h1000"), ({"device": 3}, TypeError, "3"), ({"extra": -1}, ValueError, "extra"),
                                      ({"extra": "x"}, TypeError, "extra"), ({"extra": math.inf}, ValueError, "extra"), ({"optimizer": "adamx"}, ValueError, "adamx"),
                                      ({"budget": "much"}, ValueError, "budget"), ({"budget": -1}, ValueError, "budget")):
            with self.subTest(options), self.assertRaisesRegex(error, words):
                remat.fit(self.model, self.args, **{"device": DEVICE, **options})
        for take in (remat.fit, remat.plan, remat.curve):
            with self.subTest(take.__name__), self.assertRaisesRegex(TypeError, "model"):
                take(3, self.args)
        for rates in (("x", 1e9), (1e12, None), (1e12, 1e9, "x")):
            with self.subTest(rates), self.assertRaisesRegex(TypeError, "Roofline"):
                remat.Roofline(*rates)
        for take in (remat.fit, remat.plan, remat.wrap):
            with self.subTest(take.__name__), self.assertRaisesRegex(TypeError, "kwargs must be a mapping .* got list"):
                take(copy.deepcopy(self.model), self.args, [1])
        with self.assertRaises((remat.Refused, TypeError)):
            remat.fit(self.model, (self.args[0],), device=DEVICE)


class Largest(unittest.TestCase):
    VALUES = range(1, 33)

    @classmethod
    def setUpClass(cls):
        torch.manual_seed(0)
        cls.points = remat.fit(Net(), arguments(8), device=DEVICE, budget="1 GiB").points

    def largest(self, budget, extra):
        return remat.largest(lambda n: on_meta(arguments(n)), Net().to("meta"), device=DEVICE, values=self.VALUES, extra=extra, budget=budget)

    def test_against_all_values_without_recomputation(self):
        budget = self.points[2].peak
        wanted = max(n for n in self.VALUES if remat.plan(Net(), arguments(n), budget="1 GiB", device=DEVICE, time_limit=0.1)["peak"] <= budget)
        found = self.largest(budget, 0)
        self.assertEqual(found, wanted)
        self.assertEqual(found.point.recomputed, 0)
        self.assertLess(len(found.tried), len(self.VALUES))

    def test_recomputation_makes_room(self):
        budget, most = self.points[2].peak, 0.10
        plain, found = self.largest(budget, 0), self.largest(budget, most)
        self.assertGreater(found, plain)
        self.assertLessEqual(found.point.peak, budget)
        self.assertLessEqual(found.point.extra, most)
        plan = remat.plan(Net(), arguments(int(found)), budget=budget, device=DEVICE, time_limit=2)  # a new search confirms the result
        self.assertLessEqual(plan["seconds"], (1 + most) * plan["plain_seconds"])
        with self.assertRaises(remat.OverBudget):  # no plan fits the last value
            remat.plan(Net(), arguments(self.VALUES[-1]), budget=budget, device=DEVICE, time_limit=1)

    def test_ends_of_the_range(self):
        make = lambda n: {"x": arguments(n)[0], "labels": arguments(n)[1]}  # noqa: E731
        self.assertEqual(remat.largest(make, Net(), device=DEVICE, values=(1, 2), budget="1 GiB"), 2)
        with self.assertRaisesRegex(remat.OverBudget, "smallest of the values"):
            remat.largest(make, Net(), device=DEVICE, values=(1, 2), budget="700 KiB")
        for values in ((), ("x",), (1.5,), (1, "x"), 3):
            with self.subTest(values), self.assertRaisesRegex((ValueError, TypeError), "values"):
                remat.largest(make, Net(), device=DEVICE, values=values)
        with self.assertRaisesRegex(TypeError, "make_args"):
            remat.largest(3, Net(), device=DEVICE)

    def test_values_of_large_integer_inputs(self):
        class Asks(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(8, 4)

            def forward(self, x):
                positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
                if bool((positions.diff() == 1).all()):  # too large for a plan to keep as a constant
                    return self.table(x).sum()
                return self.table(x).mean()

        found = remat.largest(lambda n: (torch.zeros(n, 4096, dtype=torch.long, device="meta"),), Asks().to("meta"), device=DEVICE, values=(64,), budget="1 GiB")
        self.assertEqual(found, 64)


class Cards(unittest.TestCase):
    def test_all(self):
        self.assertGreaterEqual(len(remat.cards()), 20)
        for name in remat.cards():
            card = remat.card(name)
            self.assertGreater(card.available, 8 << 30)
            self.assertLess(card.reserved, 1 << 30)
            self.assertTrue(card.source)
            self.assertIn(torch.float32, card.roofline.flops_per_second)
            self.assertTrue(all(math.isfinite(x) and x > 1e12 for x in card.roofline.flops_per_second.values()))

    def test_precision_of_products(self):
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("high")
            faster = remat.card("h100-sxm").roofline.flops_per_second[torch.float32]
            torch.set_float32_matmul_precision("highest")
            self.assertGreater(faster, 5 * remat.card("h100-sxm").roofline.flops_per_second[torch.float32])
        finally:
            torch.set_float32_matmul_precision(before)


class Program(unittest.TestCase):
    def run_it(self, *words):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = program.main(words)
        return status, out.getvalue(), err.getvalue()

    def test_fit(self):
        for name in ("made", "made_with_names"):
            status, out, _ = self.run_it("fit", f"{__name__}:{name}", "--device", "t4", "--optimizer", "sgd", "--extra", "5%")
            self.assertEqual(status, 0)
            self.assertIn("Net on t4", out)
            self.assertIn("fits", out)
        status, out, _ = self.run_it("fit", f"{__name__}:made", "--device", "t4", "--budget", "1 MiB")
        self.assertEqual(status, 3)

    def test_bad_input(self):
        with tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder) / "fit.json"
            for words, named in ((("fit", "no.such.module:f"), "no.such.module"), (("fit", "json"), "json"), (("fit", "json:nothing"), "nothing"),
                                 (("fit", f"{__name__}:made", "--device", "abacus"), "abacus"), (("fit", f"{__name__}:not_a_model"), "not_a_model"),
                                 (("fit", f"{__name__}:made", "--extra", "ten"), "ten"), (("fit", f"{__name__}:made", "--optimizer", "magic"), "magic"),
                                 (("fit", f"{__name__}:made", "--budget", "lots"), "lots"),
                                 (("fit", f"{__name__}:raises"), f"{__name__}:raises' raises KeyError"),
                                 (("fit", f"{__name__}:leaves"), f"{__name__}:leaves' raises SystemExit"),
                                 (("fit", f"{__name__}:made_without_gradients", "--device", "t4"), "made_without_gradients' returns cannot be planned"),
                                 (("fit", f"{__name__}:made", "--extra", "-5%"), "--extra"), (("fit", f"{__name__}:made", "--extra=-5%"), "extra"),
                                 (("fit", f"{__name__}:made", "--magic"), "--magic"), (("fit",), "function"), (("magic",), "magic"),
                                 (("fit", f"{__name__}:made_with_wrong_arguments", "--device", "t4"), "made_with_wrong_arguments' returns raises RuntimeError")):
                status, out, err = self.run_it(*words, "--json", str(target))
                self.assertEqual((status, out), (2, ""), words)
                self.assertRegex(err, "^remat: .*\n$")
                self.assertIn(named, err)
                self.assertFalse(target.exists())
        status, out, err = self.run_it("fit", f"{__name__}:made", "--device", "t4", "--json", "no/such/folder/fit.json")  # refused before any work
        self.assertEqual((status, out), (2, ""))
        self.assertIn("no/such/folder", err)
        self.assertRegex(self.run_it()[2], "^remat: .*\n$")

    def test_devices(self):
        status, out, _ = self.run_it("devices")
        self.assertEqual((status, len(out.splitlines())), (0, len(remat.cards())))


if __name__ == "__main__":
    unittest.main()
