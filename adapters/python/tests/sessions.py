# SPDX-License-Identifier: Apache-2.0
"""Sessions: exceptions of signal handlers, their end, traces of `wrap`, optimizers of users, and memory outside of plans."""

import collections
import copy
import dataclasses
import gc
import logging
import signal
import tempfile
import threading
import unittest

import following
import torch
from torch import nn

import remat

DEVICE = remat.Roofline(1e11, 1e10)


class Momentum(torch.optim.Optimizer):
    """An optimizer whose constructor has arguments of its own."""

    def __init__(self, params, rate):
        super().__init__(params, {"rate": rate})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                moving = self.state[p].setdefault("moving", torch.zeros_like(p))
                p.sub_(moving.mul_(0.9).add_(p.grad), alpha=group["rate"])


class Interrupted(Exception):
    pass


@torch.library.custom_op("remat_tests::greedy", mutates_args=())
def greedy(x: torch.Tensor) -> torch.Tensor:
    """Takes 4 MiB for numbers above 1, which it does not meet when it is measured."""
    return x * (x.new_full((1 << 20,), 2.0)[0] if x.max() > 1 else 2.0)


@greedy.register_fake
def _(x):
    return torch.empty_like(x)


class Greedy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return (super().forward(x) * greedy(x)).square().mean()


class Sessions(unittest.TestCase):
    def test_exceptions_of_signal_handlers(self):
        """An exception leaves the search, which would run for a minute."""
        def handler(*_):
            raise Interrupted

        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64 + i), nn.GELU(), nn.Linear(64 + i, 32)) for i in range(60)))
        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with self.assertRaises(Interrupted):
                remat.plan(model, (torch.randn(64, 32),), budget="60% of activations", time_limit=60, gap=0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def test_ctrl_c_ends_calls_with_many_searches(self):
        def handler(*_):
            raise KeyboardInterrupt

        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64 + i), nn.GELU(), nn.Linear(64 + i, 32)) for i in range(60)))
        args = torch.randn(64, 32),
        before = signal.signal(signal.SIGALRM, handler)
        try:
            for take in (lambda: remat.fit(model, args, device=DEVICE), lambda: remat.curve(model, args, device=DEVICE, gap=0),
                         lambda: remat.largest(lambda n: torch.zeros(n, 32), model, device=DEVICE, budget="8 MiB")):
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                with self.assertRaises(KeyboardInterrupt):
                    take()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def test_states_of_an_optimizer(self):
        model = nn.Linear(8, 8)
        found = remat.fit(model, (torch.randn(4, 8),), device=DEVICE, optimizer=Momentum(model.parameters(), 0.1), budget="1 GiB")
        self.assertEqual(found.sizes["optimizer"], sum(p.nbytes for p in model.parameters()))

    def test_a_budget_for_a_closed_session(self):
        model = remat.wrap(nn.Linear(8, 8), cache=False)
        session = remat.of(model)
        remat.unwrap(model)
        with self.assertRaisesRegex(remat.Error, "closed"):
            session.set_budget("90% of activations")
        self.assertFalse(remat.is_wrapped(model))

    def test_memory_outside_of_the_plan(self):
        """A warning names the operator once, unless the budget has room for that memory."""
        torch.manual_seed(0)
        plain, x = Greedy(), torch.randn(64, 32)
        plain(x).backward()
        for budget, warned in (("100% of activations", True), ("1 GiB", False)):
            model = remat.wrap(copy.deepcopy(plain), budget=budget, cache=False)
            with self.subTest(budget), self.assertLogs("remat", logging.WARNING) if warned else self.assertNoLogs("remat", logging.WARNING) as told:
                for _ in range(3):
                    model.zero_grad()
                    model(x).backward()
            self.assertTrue(all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)))
            self.assertGreaterEqual(remat.of(model).memory()["unplanned"], 4 << 20)
            self.assertRegex(remat.of(model).report(), r"outside of the plan +4[.\d]* MiB, by remat_tests::greedy")
            if warned:
                self.assertEqual(len(told.output), 1)
                self.assertIn("remat_tests::greedy (sessions.py:", told.output[0])
                self.assertIn("beyond the budget", told.output[0])

    def test_groups_that_no_fused_kernel_supports(self):
        def stepped(make):
            torch.manual_seed(0)
            weights = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, dtype=torch.complex64)), nn.Parameter(torch.randn(6))]
            optimizer = make(weights[:1])
            optimizer.add_param_group({"params": weights[1]})
            optimizer.add_param_group({"params": weights[2], "foreach": True})
            optimizer = copy.deepcopy(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.randn_like(p)
            optimizer.step()
            return [p.detach() for group in optimizer.param_groups for p in group["params"]]

        for cls in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
            with self.subTest(cls.__name__):
                plain, ours = stepped(lambda p: cls(p, 0.1, foreach=False)), stepped(lambda p: remat.optimizer(p, cls, lr=0.1))
                self.assertTrue(all(map(torch.equal, plain, ours)))
        positional = 0.1, 0.0, 0.0, 0.0, 1e-10, True
        plain, ours = (stepped(lambda p: cls(p, *positional)) for cls in (torch.optim.Adagrad, remat.offloaded(torch.optim.Adagrad)))
        self.assertTrue(all(map(torch.equal, plain, ours)))

    def test_a_search_ends_with_its_session(self):
        """Freeing the last step after that, with the lock of Python held, waits for no search."""
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16 + i, 17 + i), nn.GELU(), nn.LayerNorm(17 + i)) for i in range(40)))
        options = remat.Planner(time_limit=120, first_limit=0.01, gap=0.0)
        remat.wrap(model, budget="70% of activations", cache=False, planner=options)
        for rows in (64, 64, 96, 96, 96):
            model(torch.randn(rows, 16)).sum().backward()
        out = model(torch.randn(96, 16))
        remat.unwrap(model)
        node = out.grad_fn
        del out
        del node

    def test_a_thread_that_has_left_its_plan_while_another_records(self):
        ready, done = threading.Event(), threading.Event()

        class Leaves(nn.Linear):
            waits = False

            def forward(self, x):
                x = super().forward(x)
                if self.waits:
                    following.run_together([threading.Thread()])  # leaves the plan
                    ready.wait(20)
                    following.run_together([threading.Thread()])
                    done.set()
                return x

        class Recorded(nn.Linear):
            def forward(self, x):
                ready.set()
                done.wait(20)
                return super().forward(x)

        def train(model):
            model(torch.ones(4, 8)).square().sum().backward()

        leaves, recorded = remat.wrap(Leaves(8, 8), cache=False), remat.wrap(Recorded(8, 8), cache=False)
        train(leaves)
        leaves.waits = True
        following.run_together([threading.Thread(target=train, args=(m,)) for m in (leaves, recorded)])
        self.assertEqual(len(remat.of(recorded).plans), 1)

    def test_models_that_are_never_planned(self):
        """All calls return what the plain model returns, and raise what it raises."""
        class Net(nn.Linear):
            fails = False

            def forward(self, x):
                y = torch.sparse.mm(self.map, super().forward(x)) if hasattr(self, "map") else super().forward(x).to_sparse().to_dense()
                if self.fails:
                    raise LookupError(float(y.detach()[0, 0]))
                return y

        def answer(model, x):
            try:
                return model(x)
            except LookupError as e:
                return torch.tensor(e.args[0])

        for of in (None, torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
            plain, model, x = Net(8, 8), Net(8, 8), torch.randn(8, 8)
            model.load_state_dict(plain.state_dict())
            for net in (plain, model):
                if of is not None:
                    net.register_buffer("map", of(torch.eye(8)))
            remat.wrap(model, cache=False)
            for fails in (False, False, True, False):
                plain.fails = model.fails = fails
                with self.subTest(of, fails=fails):
                    self.assertTrue(torch.equal(answer(model, x), answer(plain, x)))

    def test_closing_without_the_model(self):
        model = remat.wrap(nn.Linear(8, 8), cache=False)
        session = remat.of(model)
        session._options = dataclasses.replace(session._options, steps_on=torch.device("cuda"))
        del model
        gc.collect()
        session.close()

    def test_a_wrap_that_fails(self):
        """It leaves no trace, and neither does a second one."""
        def state(model):
            hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
            return sorted(model.__dict__), [len(h or ()) for h in hooks], model.weight.tolist()

        x, plain = torch.randn(64, 32), nn.Linear(32, 32)
        with tempfile.TemporaryDirectory() as disk:
            for args, options in (((), {"planner": remat.Planner(solver="nope")}), ((), {"planner": remat.Planner(solver="rotor", solver_options={"nope": 1})}),
                                  ((x,), {"budget": 1}), ((x.to_sparse(),), {"on_refuse": "raise"}), ((x[:, 1:],), {})):
                for more in ({}, {"disk": disk, "offload": "all"}):
                    with self.subTest(options, **more):
                        model = nn.Linear(32, 32)
                        before = state(model)
                        with self.assertRaises((remat.Error, RuntimeError)):
                            remat.wrap(model, args, cache=False, **options, **more)
                        self.assertEqual(state(model), before)
                        remat.wrap(model, cache=False, budget="2 MiB")
                        before = state(model)
                        with self.assertRaises((remat.Error, RuntimeError)):
                            remat.wrap(model, args, cache=False, **options, **more)
                        self.assertEqual(state(model), before)
                        self.assertIn("2 MiB", repr(remat.of(model)))
                        model.load_state_dict(plain.state_dict())
                        model(x).sum().backward()
                        plain.zero_grad()
                        plain(x).sum().backward()
                        self.assertTrue(torch.equal(model.weight.grad, plain.weight.grad))

    def test_contents_of_containers(self):
        """A step that is only planned, and a step that is verified, change no container at any depth."""
        class Net(nn.Linear):
            def __init__(self):
                super().__init__(32, 32)
                self.last, self.counts, self.of = collections.deque(maxlen=3), {"n": [0]}, ({1: {2}}, [])
                self.lists, self.kinds = collections.defaultdict(list), collections.Counter({"a": -1})

            def held(self):
                return repr((self.last, self.counts, self.of, self.lists, self.kinds))

            def forward(self, x):
                self.last.append(len(self.last))
                self.counts["n"][0] += 1
                self.of[0][1].add(self.counts["n"][0])
                self.of[1].append(self.of)
                self.lists["x"].append(1)
                self.kinds["a"] -= 1
                return super().forward(x).relu()

        x, plain = torch.randn(8, 32), Net()
        model = remat.wrap(Net(), (x,), planner=remat.Planner(verify=2))
        self.assertEqual(model.held(), plain.held())
        for _ in range(3):
            model(x).sum().backward()
            plain(x).sum().backward()
            self.assertEqual(model.held(), plain.held())

    def test_descriptions_of_plans(self):
        """A plan for another loss tells once that gradients accumulate."""
        class Net(nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                return y.relu(), y.tanh()

        model, x = remat.wrap(Net(32, 32), cache=False), torch.randn(8, 32)
        for k in (0, 0, 0, 1, 1, 0):
            model(x)[k].sum().backward()
        told = [p.inputs for p in remat.of(model).plans]
        self.assertTrue(any("gradients accumulate" in text for text in told), told)
        self.assertFalse([text for text in told if text.count("gradients") > 1])

    def test_calls_that_are_not_planned(self):
        """Without following, too, a warning comes once, and calls are tried again."""
        class Net(nn.Linear):
            planned = False

            def forward(self, x, *_):
                y = super().forward(x)
                return y.relu() if self.planned or y.sum().item() > 0 else y.tanh()

        model, x = remat.wrap(Net(32, 32), cache=False, planner=remat.Planner(follow=False)), torch.randn(8, 32)
        for more in ((), (object(),)):
            with self.assertLogs("remat", logging.WARNING) as logs:
                for _ in range(4):
                    model(x, *more).sum().backward()
            self.assertEqual(len(logs.output), 1, logs.output)
        for planned, options, error in ((False, {"on_refuse": "raise"}, remat.Refused), (True, {"budget": 1}, remat.OverBudget)):
            Net.planned = planned
            remat.wrap(model, cache=False, planner=remat.Planner(follow=False), **options)
            for _ in range(3):
                with self.assertRaises(error):
                    model(x)
        remat.of(model).set_budget("100% of activations")
        model(x).sum().backward()
        self.assertTrue(remat.of(model).plans)
        other = remat.wrap(Net(32, 32), cache=False, planner=remat.Planner(follow=False))
        for planned in (False, True):
            Net.planned = planned
            other(x)
        self.assertTrue(remat.of(other).plans)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            model(x)
        self.assertTrue(saved)

    def test_time_of_a_step_without_operators(self):
        class Axes:
            def __getattr__(self, name):
                return lambda *a, **k: None

        points = [{"budget": 1, "peak": 1, "seconds": 0.0, "bound": 0.0, "status": "optimal"}]
        remat.Curve(points, 0.0, "").plot(Axes())


if __name__ == "__main__":
    unittest.main()
