# SPDX-License-Identifier: Apache-2.0
"""Rockmate's classes next to the plain model, bit by bit, and its configurations.

On a device (REMAT_TEST_DEVICE) only `Offmate` is tried, which trains there with weights of the host.
"""

import copy
import gc
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import unittest
import warnings

import emulated
import torch
from compare import copied, same
from torch import nn

import remat
from remat import rockmate

on_host = emulated.device.type == "cpu"
KINDS = ("rotor", "rockmate", "checkmate", "hilp", "hiremate", "offmate", "noremat")
OF_REMATERIALIZATION = (rockmate.Rockmate, rockmate.PureRotor, rockmate.PureRockmate, rockmate.PureHiremate, rockmate.PureCheckmate)


class Net(nn.Module):
    """Batch norm, dropout, a residual, tied weights."""

    def __init__(self, width=32, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.BatchNorm1d(width),
                                                  nn.Dropout(0.2)) for _ in range(depth))
        self.head = nn.Linear(width, width, bias=False)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x):
        x = self.head(x)
        for block in self.blocks:
            x = x + block(x)
        return self.tied(x)


def sample(seed=5):
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(seed))


def random_state():
    return torch.get_rng_state() if on_host else torch.get_device_module(emulated.device).get_rng_state()


def trained(make=None, optim=torch.optim.Adam, steps=4, **options):
    """What steps leave: outputs, gradients, state, generator. make: gives the module of Rockmate for a model; default: plain training."""
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
    return rk, [seen, state, random_state()], gradients


def smallest(cls, **options):
    """A tenth more than the smallest budget that an error says to do, in bytes as Rockmate counts. (Searches by time end elsewhere each time.)"""
    try:
        cls(Net(), sample(), 1, **options)
    except remat.OverBudget as e:
        return int(str(e).rpartition(" bytes do")[0].rpartition(" ")[2]) * 11 // 10
    raise AssertionError("one byte was enough")


def plan_of(rk):
    return remat.of(rk.original_mod).plan


@unittest.skipUnless(on_host, "trains on the host")
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
        self.assertLessEqual(plan_of(rk)["seconds"], 1.02 * min(alone.values()))  # costs are measured once, and kept

    def test_smallest_budget_that_an_error_names_will_do(self):
        budget = smallest(rockmate.PureRotor)
        self.assertLessEqual(rockmate.PureRotor(Net(), sample(), budget).op_sched.peak_mem, budget)

    def test_another_method_steps_in_with_a_warning(self):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rk = rockmate.from_config(Net(), sample(), int(0.7 * self.full), "noremat")  # which recomputes nothing
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
    """The optimizer steps within the backward."""

    def check(self, optim, budget, **options):
        arithmetic = {"lr": 0.01, "foreach": False}  # the same on host and device
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
        if not on_host:
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

    def test_the_model_without_it(self):
        """A constructor that fails, and a module that is gone, leave a model that trains as it is."""
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


@unittest.skipUnless(on_host, "needs no device")
class Configurations(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = pathlib.Path(folder.name) / "config.yaml"

    def test_round_trips(self):
        for kind in KINDS:
            config = rockmate.generate_config(kind)
            for options in config.solver.top.values():
                if "time_limit" in options:
                    options.time_limit = 7
            rockmate.save_config(config, self.file)
            self.assertEqual(rockmate.load_config(self.file), config)
        self.assertEqual(list(self.file.parent.iterdir()), [self.file])

    def test_defaults(self):
        config = rockmate.generate_config("rockmate")
        self.assertEqual((config.solver.bottom.hilp.nb_bdg_save, config.solver.bottom.hilp.nb_total_nodes), (10, 20))
        self.assertEqual(rockmate.default_config("hilp").nb_bdg_save, 6)
        config.solver.bottom.hilp.nb_bdg_save = 5
        self.assertEqual(rockmate.generate_config("rockmate").solver.bottom.hilp.nb_bdg_save, 10)

    def test_a_configuration_comes_fourth_or_by_name(self):
        config = rockmate.generate_config("rotor")
        for rk in (rockmate.from_config(Net(), sample(), None, config), rockmate.from_config(Net(), sample(), config=config)):
            rk(sample()).sum().backward()

    def test_none_takes_a_solver_out(self):
        config = rockmate.generate_config("hiremate")
        config.solver.top.hilp = config.solver.top.cheap = config.solver.top.twremat = None
        self.assertEqual([m.solver for m in rockmate.from_config(Net(), sample(), None, config)._methods], ["rockmate"])

    def test_time_limits_steer_and_defaults_do_not(self):
        config = rockmate.generate_config("hilp")
        self.assertEqual([m.time_limit for m in rockmate.from_config(Net(), sample(), config=config, solve_sched=False)._methods], [20])
        config.solver.top.hilp.time_limit = 3
        self.assertEqual([m.time_limit for m in rockmate.from_config(Net(), sample(), config=config, solve_sched=False)._methods], [3])

    def test_one_warning_names_what_has_no_effect(self):
        config = rockmate.generate_config("hilp")
        config.solver.bottom.hilp.nb_bdg_save = 9  # has one
        config.solver.bottom.hilp.time_limit = 9
        config.partitioner.bottom_to_top.max_len_seq = 5
        config.solver.top.hilp.time_limit = 3
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rockmate.from_config(Net(), sample(), config=config, verbose=True, solve_sched=False)
        self.assertEqual([str(w.message) for w in told], ["remat.rockmate: these options have no effect in remat: solver.bottom.hilp.time_limit=9, "
                                                          "partitioner.bottom_to_top.max_len_seq=5, verbose=True"])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rockmate.Offmate(Net(), sample(), nlayers=4, verbose=True, solve_sched=False)
        self.assertEqual([str(w.message) for w in told], ["remat.rockmate: these options have no effect in remat: nlayers=4, verbose=True"])
        for kind in KINDS:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                rockmate.from_config(Net(), sample(), config_type=kind, solve_sched=False)

    def options_of(self, config):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return [(m.solver, dict(m.options)) for m in rockmate.from_config(Net(), sample(), config=config, solve_sched=False)._methods]

    def test_options_of_parts_steer(self):
        config = rockmate.generate_config("hilp")
        self.assertEqual(self.options_of(config), [("hiremate", {})])
        config.solver.bottom.hilp |= {"nb_bdg_save": 3, "nb_bdg_peak": 1, "nb_total_nodes": 12}
        config.solver.top.hilp.nb_total_sched = 50
        config.partitioner.bottom_to_top |= {"max_estimate_per_sub_graph": 7, "max_estimate_for_main_graph": 10}
        self.assertEqual(self.options_of(config), [("hiremate", {"saved": 3, "peaks": 1, "leaf_operations": 24, "cut.size": 14, "cut.most": 10, "choices": 5})])
        config = rockmate.generate_config("rockmate")
        config.solver.bottom.hilp.nb_bdg_save = 6  # the default of other kinds
        self.assertEqual(self.options_of(config), [("rockmate", {"saved": 6})])

    def test_settings_steer_also_with_a_value_that_some_kind_has(self):
        rk = rockmate.Rockmate(Net(), sample(), top_solvers=[rockmate.solvers.RK_rotor(mem_unit=4096)],
                               bottom_solvers=[rockmate.solvers.HILP(nb_bdg_save=10)], solve_sched=False)
        method, = rk._methods
        self.assertEqual((method.solver, dict(method.options)), ("rockmate", {"saved": 10}))
        self.assertEqual(method.options_for(4096 * 100 + 1), {"saved": 10, "slots": 101})
        remat._core.check_solver("rockmate", {"slots": str(method.options_for(1 << 40)["slots"])})

    def test_options_change_the_plan(self):
        """One bound per part, and parts that are cut elsewhere: other plans, and no faster ones."""
        budget = int(0.5 * rockmate.PureRotor(Net(depth=6), sample()).op_sched.peak_mem)
        plans = {}
        for name, bottom in (("usual", {}), ("one bound", {"nb_bdg_save": 1, "nb_bdg_peak": 1})):
            rk = rockmate.Rockmate(Net(depth=6), sample(), budget, top_solvers=[rockmate.solvers.RK_rotor()],
                                   bottom_solvers=[rockmate.solvers.HILP(**bottom)], partitioners=[rockmate.partitioned.PartitionerSequence()])
            plans[name] = plan_of(rk)
        self.assertIn("(peaks=1, saved=1)", plans["one bound"].solver)
        self.assertNotIn("(", plans["usual"].solver)
        steps = [json.loads(plan.document())["steps"] for plan in plans.values()]
        self.assertNotEqual(*steps)

    def test_bad_input_is_named(self):
        def with_option(path, value):
            config = rockmate.generate_config("hilp")
            *path, last = path.split(".")
            at = config
            for key in path:
                at = at[key]
            at[last] = value
            return lambda: rockmate.from_config(Net(), sample(), config=config)

        for call, why in ((lambda: rockmate.generate_config("rotors"), "'rotors' is no kind.*did you mean rotor.*noremat"),
                          (lambda: rockmate.default_config("ilp"), "'ilp' is no solver or partitioner.*hilp"),
                          (lambda: rockmate.from_config(Net(), sample(), config_type="x"), "'x' is no kind"),
                          (with_option("solver.top.hilp.time_limt", 3), "solver.top.hilp.time_limt is unknown .did you mean time_limit"),
                          (with_option("solver.top.gurobi", {}), "solver.top.gurobi is unknown"),
                          (with_option("solver.middle", {}), "solver.middle is unknown"),
                          (with_option("partition", {}), "partition is unknown .did you mean partitioner"),
                          (with_option("solver.top.hilp.time_limit", "long"), "time_limit must be of type int, got 'long'"),
                          (with_option("solver.top.hilp.time_limit", 0), "time_limit must be >= 1, got 0"),
                          (with_option("solver.top.hilp.offload", 1), "offload must be of type bool, got 1"),
                          (with_option("solver.bottom.hilp.nb_bdg_save", 1000), "solver.bottom.hilp.nb_bdg_save=1000: .*saved must be an integer from 1 to"),
                          (with_option("partitioner.bottom_to_top.max_estimate_per_sub_graph", 0), "max_estimate_per_sub_graph=0: .*cut.size"),
                          (with_option("solver.top.hilp", 3), "solver.top.hilp must be a mapping"),
                          (lambda: rockmate.solvers.HILP(nodes=3), "HILP: nodes is unknown"),
                          (lambda: rockmate.PureRotor(Net(), sample(), partitioners=[]), "partitioners: PureRotor chooses its own"),
                          (lambda: rockmate.Hiremate(Net(), sample(), algorithms=["ilp"]), "'ilp' is unknown"),
                          (lambda: rockmate.PureRotor(Net(), sample(), "a lot"), "budget"),
                          (lambda: rockmate.Rockmate(Net(), sample(), top_solvers=[rockmate.solvers.HILP()] * 2), "twice")):
            with self.assertRaisesRegex(remat.Error, why):
                call()
        with self.assertRaisesRegex(TypeError, "remat.rockmate.solvers"):
            rockmate.Rockmate(Net(), sample(), top_solvers=["hilp"])
        with self.assertRaisesRegex(TypeError, "torch.nn.Module"):
            rockmate.PureRotor(3, sample())

    def test_damaged_files_are_named_with_the_line(self):
        for text, line, why in (("solver:\n  top:\n    hilp: {time_limit: 3\n", 4, "not YAML"), ("solver:\n  top:\n    hilp:\n      time_limt: 3\n", 4, "time_limt is unknown"),
                                ("solver: {}\nsolvers: {}\n", 2, "solvers is unknown"), ("solver: {}\nsolver: {}\n", 2, "solver is there twice"),
                                ("- 1\n", 1, "must be a mapping"), ("", 1, "must be a mapping"), ("solver:\n\x00", 2, "not YAML"),
                                ("partitioner:\n  sequence:\n    sub_partitioner: 3\n", 3, "must be of type str")):
            self.file.write_text(text)
            with self.assertRaises(remat.Error) as caught:
                rockmate.load_config(self.file)
            self.assertIn(f"{self.file}:{line}: ", str(caught.exception))
            self.assertIn(why, str(caught.exception))
        with self.assertRaises(FileNotFoundError):
            rockmate.load_config(self.file.parent / "none.yaml")
        self.file.write_text("as it was")
        with self.assertRaises(remat.Error):
            rockmate.save_config({"solvers": {}}, self.file)
        self.assertEqual(self.file.read_text(), "as it was")


if __name__ == "__main__":
    unittest.main()
