# SPDX-License-Identifier: Apache-2.0
"""Compares Rockmate's classes with the plain model bit by bit.

On a device (REMAT_TEST_DEVICE) only `Offmate` is tested: it trains on the device, with weights on the host.
"""

import copy
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import unittest
import warnings

import torch

import emulated
import remat
from compare import copied, same
from remat import rockmate
from rockmate_models import KINDS, Net, plan_of, sample


OF_REMATERIALIZATION = (rockmate.Rockmate, rockmate.PureRotor, rockmate.PureRockmate, rockmate.PureHiremate, rockmate.PureCheckmate)


def trained(make=None, optim=torch.optim.Adam, steps=4, **options):
    """Trains a model. Returns outputs, gradients, state and generator. make: makes a Rockmate module of a model; default: plain training."""
    torch.manual_seed(0)
    model = Net()
    rk = model.to(emulated.device) if make is None else make(model)
    offloads = isinstance(rk, rockmate.Rockmate) and rk.optimizer is not None
    optimizer = None if offloads else optim(model.parameters(), **options)
    torch.manual_seed(1)
    seen, gradients = [], []
    for step in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        y = rk(sample(step).to(emulated.device))
        loss = y.square().mean()
        loss.backward()
        seen += [y.detach().cpu(), loss.detach().cpu()]
        if optimizer is not None:
            gradients += [p.grad.cpu().clone() for p in model.parameters()]
            optimizer.step()
        else:
            assert all(p.grad is None for p in model.parameters())
    state = {name: t.cpu().clone() for name, t in rk.state_dict().items()}
    return rk, [seen, state, emulated.random_state()], gradients


def smallest(cls, **options):
    """The smallest budget that OverBudget names, plus 10 %, in bytes in Rockmate's terms. (Results of timed searches vary.)"""
    try:
        cls(Net(), sample(), 1, **options)
    except remat.OverBudget as e:
        return int(str(e).rpartition(" bytes do")[0].rpartition(" ")[2]) * 11 // 10
    raise AssertionError("one byte was enough")


@unittest.skipUnless(emulated.on_host, "trains on the host")
class Equal(unittest.TestCase):
    def setUp(self):
        self.full = rockmate.PureRotor(Net(), sample()).op_sched.peak_mem

    def test_classes_train_as_the_model_does(self):
        _, *plain = trained()
        for cls in OF_REMATERIALIZATION:
            for budget in (None, int(0.7 * self.full)):
                with self.subTest(cls=cls.__name__, budget=budget):
                    rk, *found = trained(lambda m: cls(m, sample(), budget))
                    self.assertTrue(same(plain, found))
                    if isinstance(budget, int):
                        self.assertGreater(plan_of(rk)["recomputed"], 0)
                        self.assertLessEqual(rk.op_sched.peak_mem, budget)

    def test_configurations_train_as_the_model_does(self):
        _, *plain = trained()
        for kind in KINDS:
            with self.subTest(kind=kind):
                budget = None if kind in ("noremat", "offmate") else int(0.7 * self.full)
                rk, seen, gradients = trained(lambda m: rockmate.from_config(m, sample(), budget, kind))
                self.assertTrue(same(plain[0], seen))
                self.assertTrue(kind == "offmate" or same(plain[1], gradients))

    def test_methods_are_those_of_the_class(self):
        for cls, names in ((rockmate.PureRotor, ("rotor",)), (rockmate.PureRockmate, ("rockmate",)), (rockmate.PureCheckmate, ("checkmate",)),
                           (rockmate.Rockmate, ("hiremate",)), (rockmate.Hiremate, ("hiremate", "rockmate"))):
            solver = plan_of(cls(Net(), sample(), int(0.7 * self.full)))["solver"]
            self.assertIn(solver.partition("/")[0], names)

    def test_fastest_competitor_wins(self):
        budget = int(0.7 * self.full)
        alone = {name: plan_of(rockmate.Hiremate(Net(), sample(), budget, algorithms=[name]))["seconds"] for name in ("hilp", "rotor", "twremat")}
        rk = rockmate.Hiremate(Net(), sample(), budget, algorithms=list(alone))
        self.assertLessEqual(plan_of(rk)["seconds"], 1.02 * min(alone.values()))  # comparable, because costs are measured once and cached

    def test_smallest_budget_that_an_error_names_will_do(self):
        budget = smallest(rockmate.PureRotor)
        self.assertLessEqual(rockmate.PureRotor(Net(), sample(), budget).op_sched.peak_mem, budget)

    def test_another_method_steps_in_with_a_warning(self):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rk = rockmate.from_config(Net(), sample(), int(0.7 * self.full), "noremat")  # "noremat" recomputes nothing
        self.assertIn("store_all found no plan", str(told[-1].message))
        self.assertGreater(plan_of(rk)["recomputed"], 0)

    def test_gradients_that_exist_and_accumulate(self):
        results = []
        for make in (lambda m: m, lambda m: rockmate.PureRockmate(m, sample(), int(0.7 * self.full))):
            torch.manual_seed(0)
            model = Net()
            rk = make(model)
            for step in range(4):
                rk(sample(step)).square().mean().backward()
            results.append([p.grad for p in model.parameters()])
        self.assertTrue(same(*results))

    def test_it_stands_for_the_model(self):
        model = Net()
        names = list(model.state_dict())
        rk = rockmate.PureRotor(model, sample())
        self.assertIs(rk.original_mod, model)
        self.assertEqual(list(rk.state_dict()), names)
        self.assertEqual([n for n, _ in rk.named_parameters()], [n for n, _ in model.named_parameters()])
        self.assertIs(next(rk.parameters()), next(model.parameters()))
        self.assertIs(rk.head, model.head)
        self.assertEqual(rk.head.in_features, 32)
        model.extra = 7
        self.assertEqual(rk.extra, 7)
        with self.assertRaisesRegex(AttributeError, "nothing_there"):
            rk.nothing_there
        rk.eval()
        self.assertFalse(model.training or model.blocks[0].training)
        with torch.no_grad():
            self.assertTrue(same(rk(sample()), copy.deepcopy(model)(sample())))
        rk.train()
        self.assertTrue(model.training)
        other = Net()
        rk.load_state_dict(other.state_dict())
        self.assertTrue(same(dict(model.state_dict()), dict(other.state_dict())))
        twin = copy.deepcopy(rk)
        self.assertIsNot(twin.original_mod, model)
        self.assertIs(twin.head, twin.original_mod.head)
        twin(sample()).sum().backward()
        self.assertIsNone(next(rk.parameters()).grad)
        again = pickle.loads(pickle.dumps(rk))
        with self.assertRaisesRegex(remat.Error, "solve_sched"):
            again(sample())
        self.assertTrue(again.solve_sched())
        again(sample()).sum().backward()

    def test_planning_later(self):
        rk = rockmate.Rockmate(Net(), {"x": sample()}, solve_sched=False)
        self.assertIsNone(rk.op_sched)
        with self.assertRaisesRegex(remat.Error, "solve_sched"):
            rk(sample())
        self.assertTrue(rk.solve_sched(int(0.7 * self.full)))
        rk.get_compiled_fct()
        self.assertGreater(plan_of(rk)["recomputed"], 0)
        rk.fast_solve()
        self.assertEqual(plan_of(rk)["recomputed"], 0)
        rk.restore_exec()
        rk(x=sample()).sum().backward()

    def test_a_model_without_anything_to_train(self):
        model = Net().requires_grad_(False).eval()
        self.assertTrue(same(rockmate.PureRockmate(model, [sample()], 10**9)(sample()), copy.deepcopy(model)(sample())))

    def test_readme_example_runs(self):
        example = pathlib.Path(__file__).resolve().parents[3] / "examples/python/rockmate.py"
        done = subprocess.run([sys.executable, example, "tiny"], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Offmate", done.stdout)


class Offloading(unittest.TestCase):
    """Offmate, whose optimizer steps within the backward."""

    def check(self, optim, budget, **options):
        arithmetic = {"lr": 0.01, "foreach": False}  # equal arithmetic on host and device
        _, plain, _ = trained(optim=optim, **arithmetic)
        rk, found, _ = trained(lambda m: rockmate.Offmate(m, sample(), budget, optim_kwargs=arithmetic, **options))
        for what, a, b in zip(("outputs", "state", "generator"), plain, found):
            self.assertTrue(same(a, b), what)
        self.assertEqual(emulated.races(), 0, emulated.race_reports())
        return rk

    def test_steps_are_those_of_the_optimizer(self):
        for optim in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            with self.subTest(optim=optim.__name__):
                rk = self.check(optim, None, cpu_optim=optim, gpu_optim=optim)
                self.assertIsInstance(rk.optimizer, optim)

    def test_within_a_budget(self):
        rk = self.check(torch.optim.Adam, smallest(rockmate.Offmate, minor_offload_size=1000), minor_offload_size=1000)
        self.assertGreater(plan_of(rk)["recomputed"] + plan_of(rk)["moved"], 0)
        if not emulated.on_host:
            self.assertTrue(all(p.device.type == "cpu" for p in rk.parameters()))
            self.assertGreater(remat.of(rk.original_mod).memory()["fetched"], 0)

    def test_on_the_device_after_the_backward(self):
        self.check(torch.optim.Adam, None, cpu_optim=None)

    def test_refusals(self):
        for options, why in (({"cpu_optim": None, "gpu_optim": None}, "give cpu_optim or gpu_optim"), ({"nlayers": 2**31}, "budget third"),
                             ({"algorithms": ["rotor"]}, "hilp alone"), ({"optim_kwargs": {"rate": 1}}, "rate")):
            with self.assertRaisesRegex((remat.Error, TypeError), why):
                rockmate.Offmate(Net(), sample(), **options)
        model = Net()
        rk = rockmate.Offmate(model, sample())
        with self.assertRaisesRegex(TypeError, "copied"):
            copy.deepcopy(rk)
        for cls in (rockmate.Rockmate, rockmate.Offmate):
            with self.assertRaisesRegex(remat.Error, "the model has an Offmate"):
                cls(model, sample())
        rk(sample().to(emulated.device)).sum().backward()
        del rk
        gc.collect()
        rockmate.Offmate(model, sample())

    def test_the_model_without_it(self):
        """After a constructor fails, or an Offmate is deleted, the model trains as a plain model."""
        model = Net()
        for budget, options in ((1, {}), (None, {"optim_kwargs": {"rate": 1}}), ("a lot", {})):
            with self.assertRaises((remat.Error, TypeError)):
                rockmate.Offmate(model, sample(), budget, **options)
            self.assertFalse(remat.is_wrapped(model))
        rk = rockmate.Offmate(model, sample())
        del rk
        gc.collect()
        remat.unwrap(model)
        before = copied(dict(model.named_parameters()))
        model(sample().to(next(model.buffers()).device)).sum().backward()
        self.assertTrue(same(before, copied(dict(model.named_parameters()))))
        self.assertIsNotNone(model.head.weight.grad)


if __name__ == "__main__":
    unittest.main()
