# SPDX-License-Identifier: Apache-2.0
"""Tests the Python planner with a problem with known answers, and with bad input. Usage: planner.py INSTANCES"""
import json
import pathlib
import sys
import unittest

import remat

INSTANCES = pathlib.Path(sys.argv.pop())


def chain():
    """x -> a -> b -> loss -> gradient of b (reads a, b) -> gradient of a (reads x, a): unit costs, 10 bytes each."""
    names = ["x", "a", "b", "loss", "gb", "ga"]
    operations = [([0], 1), ([1], 2), ([2], 3), ([3, 1, 2], 4), ([4, 0, 1], 5)]
    return {
        "format": "remat-problem", "version": 1, "name": "chain", "targets": [5],
        "values": [{"name": n, "bytes": 10, "held": n == "x"} for n in names],
        "operations": [{"name": names[o], "inputs": i, "outputs": [o], "seconds": 1.0} for i, o in operations],
    }


class Planner(unittest.TestCase):
    def test_enough_memory_is_store_all(self):
        plan = remat.solve(chain(), 1000, solver="store_all")
        self.assertEqual((plan["status"], plan["seconds"], plan["bound"]), ("optimal", 5.0, 5.0))
        self.assertEqual(remat.evaluate(chain(), plan)["peak"], plan["peak"])

    def test_half_of_a_real_model(self):
        problem = json.loads((INSTANCES / "resnet18.json").read_text())
        seen = []
        plan = remat.solve(problem, "60%", time_limit=20, observer=lambda *progress: seen.append(progress))
        self.assertIn(plan["status"], ("optimal", "feasible"))
        judged = remat.evaluate(problem, plan)
        self.assertLessEqual(judged["peak"], plan["budget"])
        self.assertEqual((judged["peak"], judged["seconds"]), (plan["peak"], plan["seconds"]))
        self.assertGreaterEqual(plan["seconds"], plan["bound"])

    def test_a_start_is_never_lost(self):
        problem = json.loads((INSTANCES / "resnet18.json").read_text())
        plan = remat.solve(problem, "60%", solver="min_cut", time_limit=20)
        again = remat.solve(problem, plan["peak"], solver="store_all", start=plan)
        self.assertEqual((again["steps"], again["seconds"]), (plan["steps"], plan["seconds"]))
        with self.assertRaisesRegex(remat.Error, "step"):
            remat.solve(chain(), 1000, start=plan)

    def test_too_little_is_infeasible(self):
        plan = remat.solve(chain(), 30)
        self.assertEqual((plan["status"], plan["steps"]), ("infeasible", []))

    def test_weights_and_optimizer_on_the_host(self):
        problem = {
            "format": "remat-problem", "version": 2, "name": "hosted", "targets": [2], "next": [[2, 0]],
            "offload": {"to_host": 10, "to_device": 10},
            "values": [{"name": "w", "bytes": 10, "starts": "host"}, {"name": "g", "bytes": 10}, {"name": "w'", "bytes": 10, "ends": "host"}],
            "operations": [{"name": "gradient", "inputs": [0], "outputs": [1], "seconds": 4},
                           {"name": "adamw", "on": "host", "inputs": [0, 1], "outputs": [2], "seconds": 3, "overwrites": [[2, 0]]}],
        }
        plan = remat.solve(problem, 20)
        self.assertEqual((plan["seconds"], plan["peaks"]), (9.0, {"device": 20, "host": 20}))
        self.assertEqual(remat.evaluate(problem, plan)["seconds"], 9.0)
        self.assertEqual(remat.solve(problem, 20, solver="revolve")["status"], "not_applicable")

    def test_bad_input_names_the_culprit(self):
        cyclic = chain()
        cyclic["operations"][0]["inputs"] = [3]
        for problem, budget, options, culprit in [
            (cyclic, 100, {}, r"operations\[0\]"),
            (chain(), "many", {}, "many"),
            (chain(), -1, {}, "-1"),
            (chain(), 100, {"solver": "magic"}, "magic"),
            (chain(), 100, {"time_limit": -1.0}, "time_limit"),
            (chain(), 100, {"gap": "x"}, "gap"),
            (chain(), 100, {"threads": 1.5}, "threads"),
            (chain(), 100, {"seed": 1 << 64}, "seed"),
            (chain(), 100, {"solver": None}, "solver"),
            (chain(), 100, {"backend": 3}, "backend"),
            (chain(), 100, {"observer": 3}, "observer"),
            (chain(), 100, {"start": []}, "start"),
            (chain(), None, {}, "budget"),
            (chain(), "", {}, "budget"),
            ([], 100, {}, "problem"),
            ({"format": object()}, 100, {}, "problem"),
        ]:
            with self.subTest(culprit), self.assertRaisesRegex((ValueError, TypeError), culprit):
                remat.solve(problem, budget, **options)
        for pair, culprit in (((chain(), 3), "schedule"), ((3, {}), "problem")):
            with self.assertRaisesRegex(TypeError, culprit):
                remat.evaluate(*pair)
        with self.assertRaisesRegex(remat.Error, "step 0"):
            remat.evaluate(chain(), {"format": "remat-schedule", "version": 1, "steps": [["compute", 4]]})

    def test_solvers_are_listed(self):
        self.assertLessEqual({"store_all", "chen", "rotor", "checkmate", "rockmate", "offmate", "pofo", "poet", "automatic"}, set(remat.solvers()))


if __name__ == "__main__":
    unittest.main()
