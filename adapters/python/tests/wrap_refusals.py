# SPDX-License-Identifier: Apache-2.0
"""Calls and options that remat.wrap refuses, and the messages of the errors."""

import contextlib
import io
import itertools
import logging
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import emulated
import torch
from torch import nn

import remat
from compare import check, copied, same, trained
from wrapping import Chain, inputs


class _Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.sparse.mm(self.layer(x).to_sparse(), self.layer.weight)


class Refusals(unittest.TestCase):
    """Refusals of replayed forwards (follow=False) name the place and a remedy. For followed forwards see follow_calls.py."""

    def refused(self, model, *args, **kwargs):
        state = emulated.random_state()
        before = copied([dict(model.state_dict()), {k: v for k, v in model.__dict__.items() if type(v) in (int, list, dict)}])
        remat.wrap(model, follow=False, on_refuse="raise")
        with self.assertRaises(remat.Refused) as e:
            model(*args, **kwargs)
        after = copied([dict(model.state_dict()), {k: v for k, v in model.__dict__.items() if type(v) in (int, list, dict)}])
        self.assertTrue(same(before, after))
        self.assertTrue(torch.equal(state, emulated.random_state()))
        return e.exception

    def test_values_of_activations(self):
        class Net(Chain):
            def forward(self, x):
                y = super().forward(x)
                return y if y.sum().item() > 0 else -y  # the line

        class Hidden(Net):
            def forward(self, x):
                try:
                    return super().forward(x)
                except Exception:
                    return x * self.layers[0].bias

        for kind in (Net, Hidden):
            e = self.refused(kind(), inputs()[0][0][0])
            self.assertEqual(e.operator, "aten::_local_scalar_dense")
        e = self.refused(Net(), inputs()[0][0][0])
        self.assertIn("# the line", e.source)
        self.assertIn("wrap_refusals.py", e.source)

    def test_memory_read_directly(self):
        class Net(Chain):
            def forward(self, x):
                y = super().forward(x)
                return y * y.detach().cpu().numpy().sum().item()

        self.assertIn("numpy", str(self.refused(Net(), inputs()[0][0][0])))

    def test_attributes_that_count(self):
        class Net(Chain):
            def __init__(self):
                super().__init__()
                self.calls = 0
                self.list = []

            def forward(self, x):
                self.calls += 1
                self.list.append(self.calls)
                return super().forward(x)

        e = self.refused(Net(), inputs()[0][0][0])
        self.assertIn("calls", str(e))
        self.assertIn("list", str(e))

    def test_attributes_filled_once_are_no_reason(self):
        class Net(Chain):
            def __init__(self):
                super().__init__()
                self.ready = False

            def forward(self, x):
                if not self.ready:
                    self.ready = True
                return super().forward(x)

        check(self, Net, inputs(), budgets=("100% of activations",))

    def test_changed_arguments(self):
        class Net(Chain):
            def forward(self, batch):
                batch["y"] = super().forward(batch["x"])
                return batch["y"]

        batch = {"x": inputs()[0][0][0]}
        self.assertIn("arguments", str(self.refused(Net(), batch)))
        self.assertEqual(list(batch), ["x"])

    def test_arguments_without_value(self):
        m = Chain()
        m.forward = lambda x, f: Chain.forward(m, x)
        for wrong, name in ((object(), "object"), (lambda: 1, "function"), (torch.Generator(), "Generator"), (io.StringIO(), "StringIO")):
            e = self.refused(m, inputs()[0][0][0], wrong)
            self.assertIn(name, str(e))
            self.assertIn("[0][1]", str(e))
            remat.unwrap(m)

    @unittest.skipIf(emulated.is_emulated, "no sparse tensors there")
    def test_tensors_that_are_not_plain(self):
        class Sub(torch.Tensor):
            pass

        x = inputs()[0][0][0]
        for wrong in (x.to_sparse(), x.as_subclass(Sub), torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)):
            self.assertIn("arguments[0][0]", str(self.refused(Chain(), wrong)))

    @unittest.skipIf(emulated.is_emulated, "no compiler of kernels there")
    def test_tracers_see_the_model(self):
        x = inputs()[0][0][0]
        m = remat.wrap(Chain(dropout=0.0)).eval()
        expected = m(x)
        self.assertTrue(torch.equal(torch.jit.trace(m, x)(x), expected))
        self.assertTrue(torch.equal(torch.export.export(m, (x,)).module()(x), expected))

    def test_transforms(self):
        m = remat.wrap(Chain(dropout=0.0), on_refuse="raise")
        m.norm.eval()
        (x,), _ = inputs()[0]
        with self.assertRaisesRegex(remat.Refused, "torch.func"):
            torch.func.grad(lambda p: torch.func.functional_call(m, p, (x,)).sum())(dict(m.named_parameters()))

    @unittest.skipIf(emulated.is_emulated, "no sparse tensors there")
    def test_warn_runs_plainly(self):
        class Net(Chain):
            def forward(self, x):
                y = super().forward(x)
                return y + y.detach().to_sparse().to_dense().mean()

        _, expected = trained(Net, inputs())
        with self.assertLogs("remat", logging.WARNING) as seen:
            _, found = trained(Net, inputs(), lambda m: remat.wrap(m, on_refuse="warn"))
        self.assertTrue(same(expected, found))
        self.assertEqual(len([r for r in seen.records if "not planned" in r.getMessage()]), 1)

    def test_hooks_that_a_refused_forward_registers_once(self):
        class Net(Chain):
            def forward(self, x):
                if not hasattr(self, "hooked"):
                    self.hooked = True
                    self.layers[0].register_forward_hook(lambda module, args, y: y * 2)
                    self.layers[0].register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
                y = super().forward(x)
                return y if y.sum().item() > 0 else -y

        _, expected = trained(Net, inputs())
        model, found = trained(Net, inputs(), lambda m: remat.wrap(m, on_refuse="warn"))
        self.assertTrue(same(expected, found))
        self.assertEqual(len(model.layers[0]._forward_hooks), 1)
        self.assertEqual(len(model.layers[0]._forward_pre_hooks_with_kwargs), 1)

    def test_new_shapes(self):
        for choice in ("plain", "error"):
            m = remat.wrap(Chain(), on_new_shape=choice)
            (x,), _ = inputs()[0]
            m(x).sum().backward()
            with self.assertRaises(remat.Refused) if choice == "error" else contextlib.nullcontext():
                m(x[:9]).sum().backward()
            m(x).sum().backward()

    @unittest.skipIf(emulated.is_emulated, "no sparse tensors there")
    def test_new_shapes_that_are_never_planned(self):
        for choice in ("plain", "error"):
            m = remat.wrap(_Sparse(), on_new_shape=choice)
            for k in (4, 8, 4):
                self.assertEqual(m(torch.randn(k, 4)).shape, (k, 4))

    def test_hooks_inside_are_told(self):
        m = remat.wrap(Chain(), follow=False)
        m.layers[2].register_forward_hook(lambda *a: None)
        with self.assertLogs("remat", logging.WARNING) as seen:
            for (x,), _ in inputs():
                m(x).sum().backward()
        self.assertIn("layers.2", seen.output[0])
        self.assertEqual(len(seen.output), 1)

    def test_graph_of_gradients_and_second_backward(self):
        m = remat.wrap(Chain(), follow=False)
        (x,), _ = inputs()[0]
        with self.assertRaisesRegex(RuntimeError, "create_graph"):
            torch.autograd.grad(m(x).sum(), list(m.parameters()), create_graph=True)
        y = m(x).sum()
        y.backward(retain_graph=True)
        with self.assertRaisesRegex(RuntimeError, "one backward"):
            y.backward()

    def test_over_budget(self):
        m = remat.wrap(Chain(), budget="1 MB", time_limit=5)
        with self.assertRaises(remat.OverBudget) as e:
            m(torch.randn(4096, 32))
        e = e.exception
        self.assertIsInstance(e, RuntimeError)
        self.assertIn(" out of memory.", e.args[0])
        self.assertEqual(len(e.args), 1)
        self.assertLessEqual(e.bound, e.needed)
        self.assertGreater(e.bound, 1e6)
        self.assertRegex(e.largest, r"aten::\w+ with \d+ bytes")
        self.assertIn("the search ended early, as nothing comes near", e.args[0])
        self.assertEqual(pickle.loads(pickle.dumps(e)).needed, e.needed)
        remat.of(m).set_budget(e.needed)
        m(torch.randn(4096, 32)).sum().backward()
        self.assertLessEqual(remat.of(m).plan["peak"], e.needed)

    def test_options(self):
        for wrong, kind, culprit in (({"budget": "many"}, remat.Error, "many"), ({"budget": -1}, ValueError, "-1"), ({"budget": [1]}, TypeError, "budget"),
                                     ({"budget": True}, TypeError, "budget"), ({"budget": 1, "activation_budget": 1}, ValueError, "both"),
                                     ({"solver": "magic"}, remat.Error, "magic"), ({"time_limit": -1}, ValueError, "time_limit"),
                                     ({"gap": 2}, remat.Error, "gap"), ({"verify": -1}, ValueError, "verify"), ({"budget": float("nan")}, ValueError, "nan"),
                                     ({"verify": 1 << 64}, ValueError, "verify"), ({"solver_options": (1,)}, TypeError, "solver_options"),
                                     ({"device": "x"}, ValueError, "device"), ({"device": ""}, ValueError, "device"), ({"device": 3}, TypeError, "device"),
                                     ({"on_new_shape": "x"}, ValueError, "on_new_shape"), ({"on_refuse": "x"}, ValueError, "on_refuse")):
            m = Chain()
            with self.assertRaisesRegex(kind, culprit):
                remat.wrap(m, **wrong)
            self.assertFalse(remat.is_wrapped(m))
        with self.assertRaisesRegex(TypeError, "Module"):
            remat.wrap(lambda x: x)

    def test_budgets_as_text(self):
        (x,), _ = inputs()[0]
        found = []
        for budget in ("80MB", "80 MB", 80e6, 80_000_000, " 80 mb ", "80000 kB"):
            m = remat.wrap(Chain(), (x,), budget=budget)
            found.append(remat.of(m).memory()["budget"])
        self.assertEqual(set(found), {80_000_000})
        held = remat.of(m).memory()["held"]
        m = remat.wrap(Chain(), (x,), activation_budget="5 MB")
        copies = sum(emulated.allocated(b.nbytes) for b in m.buffers())  # copies of buffers that the step writes; "held" includes them
        self.assertEqual(remat.of(m).memory()["budget"], held - copies + 5_000_000)
        for text, words in (("120% of device", "no more than 100 %"), ("50% of the device", "after the % goes"), ("-5%", "no percentage")):
            with self.subTest(text), self.assertRaisesRegex(ValueError, words):
                remat.wrap(Chain(), budget=text)

    def test_part_for_another_version_of_torch(self):
        """If the extension cannot be loaded, the error tells what the loader says. The planner still works."""
        there = pathlib.Path(remat.__file__).parent
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder) / "remat"
            package.mkdir()
            for file in there.iterdir():
                (package / file.name).symlink_to(file)
            part = next(package.glob("_torch*.so"))
            part.unlink()
            part.write_bytes(b"")
            code = "import remat\nprint(len(remat.solvers()) > 5)\ntry:\n    remat.wrap\nexcept ImportError as e:\n    print(e)"
            done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True, check=True)
        planner, said = done.stdout.splitlines()
        self.assertEqual(planner, "True")
        self.assertIn(f"beside torch {torch.__version__}: ", said)
        self.assertIn("file too short", said)  # what the loader says

    def test_optimizer(self):
        """The budget counts the states of an optimizer for parameters of this model, also states that its first step will allocate."""
        (x,), _ = inputs()[0]
        for make, each in ((lambda p: torch.optim.AdamW(p, lr=0.1), 2), (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1),
                           (lambda p: torch.optim.SGD(p, 0.1), 0), (lambda p: torch.optim.Adafactor(p), None)):
            m = Chain()
            of_states = make([*m.parameters(), nn.Parameter(torch.ones(1000))])
            m(x).square().mean().backward()
            of_states.step()
            states = sum(t.nbytes for p in m.parameters() for t in of_states.state[p].values())
            if each is not None:
                self.assertLess(abs(states - each * sum(p.nbytes for p in m.parameters())), 1000)
            m2 = Chain()
            optimizer = make(m2.parameters())
            self.assertEqual(remat.of(remat.wrap(m2, optimizer=optimizer)).optimizer_bytes, states)
            self.assertEqual(remat.of(remat.wrap(m, optimizer=of_states)).optimizer_bytes, states)
        self.assertEqual(remat.of(remat.wrap(Chain(), optimizer="1 MB")).optimizer_bytes, 10**6)
        m, plain = Chain(), Chain()
        with self.assertRaises(remat.OverBudget) as over:
            remat.wrap(m, budget=1, optimizer=torch.optim.AdamW(m.parameters()))(x)
        with self.assertRaises(remat.OverBudget) as less:
            remat.wrap(plain, budget=1)(x)
        self.assertGreaterEqual(over.exception.needed - less.exception.needed, 2 * sum(p.nbytes for p in m.parameters()))

    def test_verify(self):
        m = remat.wrap(Chain(), budget="90% of activations", verify=2, time_limit=5)
        with self.assertNoLogs("remat", logging.WARNING):
            for (x,), _ in inputs(4):
                m(x).sum().backward()

    def test_verify_of_a_loss_of_what_the_module_keeps(self):
        """A plain forward beside the step returns no tensor for this gradient."""
        class Keeps(Chain):
            def forward(self, x):
                self.last = super().forward(x)

        plain, m = Chain(dropout=0), remat.wrap(Keeps(dropout=0), planner=remat.Planner(verify=2, time_limit=5))
        m.load_state_dict(plain.state_dict())
        with self.assertLogs("remat", logging.WARNING) as told:
            for (x,), _ in inputs(4):
                m(x)
                for model, y in (m, m.last), (plain, plain(x)):
                    model.zero_grad()
                    y.square().mean().backward()
                self.assertTrue(all(torch.equal(p.grad, q.grad) for p, q in zip(m.parameters(), plain.parameters(), strict=True)))
        self.assertEqual([text.rpartition(": ")[2] for text in told.output], ["the loss depends on a tensor that the module keeps"] * 2)

    def test_errors_of_a_backward(self):
        """Errors of a backward have the same types as other errors, on every thread."""
        (x,), _ = inputs()[0]
        model = remat.wrap(Chain(), follow=False)
        for _ in range(2):
            with self.assertRaisesRegex(remat.Refused, "create_graph=true") as seen:
                model(x).sum().backward(create_graph=True)
            self.assertIs(type(seen.exception), remat.Refused)
        model(x).sum().backward()
        self.assertIsNotNone(model.layers[0].weight.grad)

    def test_verify_of_a_step_that_is_not_equal_to_itself(self):
        calls = itertools.count()
        library = torch.library.Library("remat_noise", "DEF")
        self.addCleanup(library._destroy)
        library.define("noisy(Tensor x) -> Tensor")
        library.impl("noisy", lambda x: x * (1 + 1e-6 * (next(calls) % 1000)), "CompositeExplicitAutograd")

        class Noisy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                return torch.ops.remat_noise.noisy(g)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

            def forward(self, x):
                return Noisy.apply(self.first(x)).tanh() + self.second(x) * factor

        factor = 1.0
        model = remat.wrap(Net(), verify=3, follow=False)
        (x,), _ = inputs()[0]
        with self.assertLogs("remat", logging.WARNING) as seen:
            model(x).sum().backward()
        self.assertEqual(len(seen.output), 1)
        self.assertIn("come from remat_noise::noisy; torch.use_deterministic_algorithms(True) may help", seen.output[0])
        self.assertTrue(seen.output[0].endswith(". 2 of 4 gradients are not compared: first.bias, first.weight"), seen.output[0])
        self.assertIsNotNone(model.second.weight.grad)
        factor = 2.0  # a change that no guard can see
        with self.assertRaisesRegex(remat.NotEqual, "output 0"):
            model(x)


if __name__ == "__main__":
    unittest.main()
