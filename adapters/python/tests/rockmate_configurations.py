# SPDX-License-Identifier: Apache-2.0
"""Rockmate's configurations: options that have an effect, files, and errors for bad input."""

import json
import pathlib
import tempfile
import unittest
import warnings

import emulated
import remat
from remat import rockmate
from rockmate_models import KINDS, Net, plan_of, sample


@unittest.skipUnless(emulated.on_host, "needs no device")
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
        config.solver.bottom.hilp.nb_bdg_save = 9  # an option with an effect; the next two have none
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
        config.solver.bottom.hilp.nb_bdg_save = 6  # the default of other kinds of configuration
        self.assertEqual(self.options_of(config), [("rockmate", {"saved": 6})])

    def test_settings_steer_also_with_a_value_that_some_kind_has(self):
        rk = rockmate.Rockmate(Net(), sample(), top_solvers=[rockmate.solvers.RK_rotor(mem_unit=4096)],
                               bottom_solvers=[rockmate.solvers.HILP(nb_bdg_save=10)], solve_sched=False)
        method, = rk._methods
        self.assertEqual((method.solver, dict(method.options)), ("rockmate", {"saved": 10}))
        self.assertEqual(method.options_for(4096 * 100 + 1), {"saved": 10, "slots": 101})
        remat._core.check_solver("rockmate", {"slots": str(method.options_for(1 << 40)["slots"])})

    def test_options_change_the_plan(self):
        """One bound per part leads to another plan than the usual number of bounds."""
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
