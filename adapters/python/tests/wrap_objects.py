# SPDX-License-Identifier: Apache-2.0
"""A wrapped model stays the same object. Also tests copies, pickles, options and plans."""

import copy
import functools
import gc
import inspect
import io
import pickle
import threading
import types
import unittest
import unittest.mock
import warnings
import weakref

import emulated
import torch
from torch import nn

import remat
from compare import copied, same
from wrapping import Chain, inputs


class InPlace(unittest.TestCase):
    """Wrapping does not change the visible model."""

    def test_same_object(self):
        m = Chain()
        before = (type(m), repr(m), dir(m), list(m.state_dict()), inspect.signature(m.forward), m.forward.__doc__, m.forward.__name__)
        self.assertIs(remat.wrap(m), m)
        after = (type(m), repr(m), dir(m), list(m.state_dict()), inspect.signature(m.forward), m.forward.__doc__, m.forward.__name__)
        self.assertEqual(before[:2] + before[3:], after[:2] + after[3:])
        self.assertEqual([n for n in after[2] if n not in before[2] and not n.startswith("_")], [])
        self.assertFalse(hasattr(m.forward, "__wrapped__"))
        self.assertTrue(remat.is_wrapped(m))
        self.assertIs(remat.unwrap(m), m)
        self.assertIs(remat.unwrap(m), m)
        self.assertFalse(remat.is_wrapped(m))
        self.assertEqual(m.__dict__.keys(), Chain().__dict__.keys())
        with self.assertRaisesRegex(remat.Error, "Chain is not wrapped"):
            remat.of(m)

    def test_forward_of_the_instance(self):
        m = Chain(dropout=0.0)
        (x,), _ = inputs()[0]
        plain = m.forward

        def doubled(x):
            return plain(x) * 2

        m.forward = doubled
        expected = m(x)
        remat.wrap(m)
        self.assertEqual(str(inspect.signature(m.forward)), "(x)")
        self.assertTrue(same(copied(m(x)), copied(expected)))
        self.assertIs(remat.unwrap(m).forward, doubled)

    def test_forward_wrapped_again(self):
        m = remat.wrap(Chain(dropout=0.0))
        (x,), _ = inputs()[0]
        ours = m.forward
        m.forward = lambda x: ours(x) * 2
        m(x).sum().backward()
        self.assertGreater(remat.of(m).plan["operations"], 0)
        remat.unwrap(m)
        self.assertFalse(remat.is_wrapped(m))
        m(x).sum().backward()

    def test_forward_that_takes_the_place_of_ours(self):
        """Some trainers replace the forward of a wrapped model. The new forward runs submodules, or calls the old forward for some arguments."""

        def run(follow):
            torch.manual_seed(1)
            m, calls, found = Chain(), [], []
            if follow is not None:
                remat.wrap(m, budget="150% of activations", time_limit=5, follow=follow, cache=False)
            before = m.forward

            def other(self, x, fused=True):
                calls.append(fused)
                return self.norm(self.layers[0](x)).relu() if fused else before(x)

            def step(model, x, **more):
                planned = remat.is_wrapped(model) and remat.of(model).memory()["planned"]
                model.zero_grad()
                y = model.forward(x, **more)
                (y.square() if len(found) % 2 else y).sum().backward()
                found.append(copied([y, {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers()), emulated.random_state()]))
                return planned != (remat.is_wrapped(model) and remat.of(model).memory()["planned"])

            changed = []
            for i, (x,) in enumerate(a for a, _ in inputs(6)):
                if i == 2:
                    m.forward = types.MethodType(other, m)
                if i == 4:
                    m.forward = before
                changed.append(step(m, x))
                if i == 3:
                    step(m, x, fused=False)
                    kept, twin = m.forward, copy.deepcopy(m)
                    self.assertEqual(remat.is_wrapped(twin), follow is not None)
                    step(twin, x)
            if follow is not False:
                self.assertEqual(len(calls), 4)
            if follow is not None:
                self.assertTrue(changed[2] and changed[4])
                m.forward = kept
                remat.unwrap(m)
                self.assertIs(m.forward.__func__, other)
                step(m, x), step(m, x, fused=False)
            return found[:8]

        expected = run(None)
        for follow in (True, False):
            self.assertTrue(same(run(follow), expected), f"follow={follow}")

    def test_deep_copy(self):
        m = remat.wrap(Chain(), budget="90% of activations", time_limit=5)
        (x,), _ = inputs()[0]
        m(x).sum().backward()
        n = copy.deepcopy(m)
        with torch.no_grad():
            for p in n.parameters():
                p.add_(1)
        p = Chain()
        p.load_state_dict(n.state_dict())
        found = []
        for model in (n, p):
            torch.manual_seed(3)
            model.zero_grad()
            y = model(x)
            y.sum().backward()
            found.append(copied([y, [q.grad for q in model.parameters()]]))
        self.assertTrue(same(*found))
        self.assertTrue(remat.is_wrapped(n))
        self.assertIsNot(remat.of(n), remat.of(m))

    def test_pickle(self):
        torch.manual_seed(0)
        m = remat.wrap(_Pickled())
        (x,), _ = inputs()[0]
        m(x).sum().backward()
        text = pickle.dumps(m)
        self.assertNotIn(b"remat._", text)
        n = pickle.loads(text)
        self.assertFalse(remat.is_wrapped(n))
        self.assertTrue(same(dict(n.state_dict()), dict(m.state_dict())))
        file, plain = io.BytesIO(), io.BytesIO()
        torch.save(m, file)
        torch.save(remat.unwrap(copy.deepcopy(m)), plain)
        self.assertLess(file.tell() - plain.tell(), 1000)
        file.seek(0)
        n = torch.load(file, weights_only=False)
        remat.wrap(n)
        n(x).sum().backward()
        self.assertTrue(remat.is_wrapped(copy.deepcopy(n)))

    def test_nothing_keeps_the_model(self):
        m = remat.wrap(Chain())
        (x,), _ = inputs()[0]
        m(x).sum().backward()
        w = weakref.ref(m)
        s = weakref.ref(m.layers[0].weight)
        del m
        gc.collect()
        self.assertIsNone(w())
        self.assertIsNone(s())

    def test_models_that_are_dropped(self):
        """A search over many models: each model is freed before the next one trains, as without `wrap`."""
        class Acting(Chain):
            def __init__(self, width):
                super().__init__(width)
                self.act = self.gelu

            def gelu(self, x):
                return torch.nn.functional.gelu(x)

            def forward(self, x):
                return self.act(super().forward(x))

        alive = []
        gc.disable()
        try:
            for _ in range(4):
                model = torch.nn.Sequential(Chain(16), torch.nn.Linear(16, 1))
                remat.wrap(model[0], cache=False)
                remat.wrap(model, cache=False)
                held = remat.wrap(Acting(16), cache=False).forward  # a bound method keeps its model
                remat.wrap(torch.nn.Linear(1, 1))
                alive.append((weakref.ref(model), weakref.ref(held.__self__)))
                model(torch.randn(2, 16)).sum().backward()
                self.assertEqual([model() is None for model, _ in alive], [True] * (len(alive) - 1) + [False])
                self.assertIs(held.__self__, alive[-1][1]())
                held(torch.randn(2, 16)).sum().backward()
                self.assertTrue(remat.of(held.__self__).plans)
        finally:
            gc.enable()

    def test_wrap_twice_sets_the_budget(self):
        m = remat.wrap(Chain(), *[inputs()[0][0]], budget="100% of activations")
        s = remat.of(m)
        peak = s.plan["peak"]
        forward = m.forward
        remat.wrap(m, budget="85% of activations", time_limit=5)
        self.assertIs(remat.of(m), s)
        self.assertEqual(m.forward, forward)
        (x,), _ = inputs()[0]
        m(x).square().sum().backward()
        self.assertLess(s.plan["peak"], peak)
        s.set_budget("100% of activations")
        m.zero_grad()
        m(x).square().sum().backward()
        self.assertEqual(s.plan["peak"], peak)

    def test_data_parallel(self):
        m = remat.wrap(Chain())
        with self.assertRaisesRegex(remat.Refused, "torchrun"):
            m._replicate_for_data_parallel()
        with self.assertRaisesRegex(remat.Refused, "torchrun"):
            remat.wrap(nn.DataParallel(Chain()))
        remat.unwrap(m)._replicate_for_data_parallel()

    def test_compile(self):
        from torch._dynamo.testing import CompileCounter

        torch._dynamo.reset()
        count = CompileCounter()
        (x,), _ = inputs()[0]
        torch.manual_seed(0)
        m, n = Chain(), Chain()
        n.load_state_dict(m.state_dict())
        remat.wrap(n)
        compiled = torch.compile(n, backend=count)
        for i in range(4):
            found = []
            for f, model in ((m, m), (compiled, n)):
                torch.manual_seed(i)
                model.zero_grad()
                y = f(x)
                y.sum().backward()
                found.append(copied([y, [p.grad for p in model.parameters()]]))
            self.assertTrue(same(*found))
        self.assertEqual(count.op_count, 0)
        self.assertGreater(remat.of(n).plan["operations"], 0)
        n.compile(backend=count)
        n(x).sum().backward()
        self.assertEqual(count.op_count, 0)

    def test_paused_and_closed(self):
        m = remat.wrap(Chain())
        (x,), _ = inputs()[0]
        with remat.of(m).paused():
            m(x).sum().backward()
        with self.assertRaises(remat.Error):
            remat.of(m).plan
        m(x).sum().backward()
        remat.of(m).invalidate()
        m(x).sum().backward()
        remat.of(m).release()
        m(x).sum().backward()
        remat.of(m).close()
        self.assertFalse(remat.is_wrapped(m))
        m(x).sum().backward()

    def test_threads(self):
        m = remat.wrap(Chain(dropout=0.0))
        (x,), _ = inputs()[0]
        m.norm.eval()
        m(x)
        expected = copied(m(x))
        wrong = []

        def work(first):
            try:
                for i in range(first, first + 20):
                    y = m(x)
                    if not same(copied(y), expected):
                        wrong.append("other outputs")
                    (y.sum() if i % 2 else y.square().mean()).backward()  # a change of the loss: the forward runs once more, and is captured anew
            except Exception as e:
                wrong.append(e)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        self.assertEqual(wrong, [])


class Plans(unittest.TestCase):
    """Plans without training: the cost of a budget."""

    def test_plan(self):
        m = Chain()
        (x,), _ = inputs()[0]
        before = copied([dict(m.state_dict()), emulated.random_state()])
        tight = remat.plan(m, (x,), budget="92% of activations", time_limit=5)
        plain = remat.plan(m, (x,))
        self.assertFalse(remat.is_wrapped(m))
        self.assertTrue(same(before, copied([dict(m.state_dict()), emulated.random_state()])))
        self.assertLess(tight["peak"], plain["peak"])
        self.assertGreater(tight["recomputed"], plain["recomputed"])
        self.assertLessEqual(tight["bound"], tight["seconds"])
        with self.assertRaises(remat.OverBudget):
            remat.plan(m, (x,), budget=1, time_limit=2)
        remat.wrap(m)
        self.assertEqual(remat.plan(m, (x,))["peak"], plain["peak"])

    def test_curve(self):
        curve = remat.curve(Chain(), (inputs()[0][0][0],), points=5, time_limit=5)
        found = [(p["budget"], p["seconds"]) for p in curve.points if p["seconds"]]
        self.assertGreater(len(found), 1)
        self.assertEqual(sorted(found, reverse=True), found)
        self.assertTrue(curve.svg().startswith("<svg"))


class _Pickled(Chain):
    pass


class Copies(unittest.TestCase):
    def test_shallow_and_pickled(self):
        (x,), _ = inputs()[0]
        for bound in (False, True):
            m = Chain(dropout=0.0).eval()
            if bound:
                m.forward = functools.partial(Chain.forward, m)
            expected = m(x)
            keys = list(m.__dict__)
            remat.wrap(m)
            for other in (copy.copy(m), pickle.loads(pickle.dumps(m))):
                self.assertFalse(remat.is_wrapped(other))
                self.assertEqual(sorted(other.__dict__), sorted(keys))
                self.assertTrue(torch.equal(other(x), expected))
            self.assertIs(copy.copy(m).norm, m.norm)
            self.assertTrue(remat.is_wrapped(copy.deepcopy(m)))


class Groups(unittest.TestCase):
    """Options in groups, and as single arguments as before version 0.3."""

    def test_both_spellings_are_the_same(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            new = remat.of(remat.wrap(Chain(), budget="1 GiB", planner=remat.Planner(time_limit=3, verify=1, on_new_shape="plan")))._options
            also = remat.of(remat.wrap(Chain(), budget="1 GiB", offload=remat.Offload("none")))._options
        with self.assertWarnsRegex(DeprecationWarning, r"remat.Planner\((time_limit|verify|on_new_shape)="):
            old = remat.of(remat.wrap(Chain(), budget="1 GiB", time_limit=3, verify=1, on_new_shape="plan"))._options
        self.assertEqual(new, old)
        self.assertEqual(also, remat.of(remat.wrap(Chain(), budget="1 GiB"))._options)
        self.assertNotEqual(new, also)

    def test_warnings_point_at_the_caller(self):
        with self.assertWarns(DeprecationWarning) as seen:
            remat.wrap(Chain(), gap=0.1)
        self.assertEqual(seen.filename, __file__)

    def test_bad_groups(self):
        for options, error, words in (({"tim_limit": 3}, TypeError, "tim_limit"), ({"planner": 3}, TypeError, "remat.Planner"),
                                      ({"planner": remat.Planner(), "gap": 0.1}, TypeError, "gap"),
                                      ({"offload": remat.Offload("all"), "weights": "paged"}, TypeError, "weights"),
                                      ({"offload": remat.Offload("some")}, ValueError, "some"), ({"planner": remat.Planner(gap="x")}, TypeError, "gap"),
                                      ({"planner": remat.Planner(first_limit=-1)}, ValueError, "first_limit")):
            with self.subTest(options), self.assertRaisesRegex(error, words):
                remat.wrap(Chain(), **options)


if __name__ == "__main__":
    unittest.main()
