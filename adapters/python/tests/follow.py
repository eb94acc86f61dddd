# SPDX-License-Identifier: Apache-2.0
"""Planned steps run the module's own code. Its reads of state, kept tensors, exceptions and hooks equal eager mode bit by bit."""

import contextlib
import io
import logging
import unittest

import emulated
import torch
from torch.utils.checkpoint import checkpoint

from following import Net, STATES, Test, backward


class State(Test):
    """State that changes between two steps."""

    def test_read_by_the_forward(self):
        for name, (make, read, change) in STATES.items():
            class Reads(Net):
                def begin(self):
                    make(self)

                def act(self, h):
                    return (h * read(self)).tanh()

            def step(model, x, k):
                if k >= 2:
                    change(model, 2.0 + k)
                backward(model, x, k)

            with self.subTest(name):
                self.check(Reads, step)

    def test_seeds(self):
        """The forward sets or reads the state of the generator, which differs in each step."""
        def seeded(model, h, k):
            torch.manual_seed(k)
            return h

        def forked(model, h, k):
            with torch.random.fork_rng():
                torch.manual_seed(k)
                return h * torch.rand(())

        def read(model, h, k):
            model.states.append(emulated.random_state())
            return h

        for act in (seeded, forked, read, lambda model, h, k: seeded(model, h, k) if k % 3 == 0 else h):
            for drawn in (False, True):
                class Seeds(Net):
                    def begin(self):
                        self.steps, self.states = 0, []

                    def act(self, h):
                        self.steps += 1
                        return act(self, h + torch.rand(()) if drawn else h, self.steps)

                with self.subTest(act.__name__, drawn=drawn):
                    self.check(Seeds, steps=7, plans=not (drawn and act in (forked, read)))

    def test_every_step_is_planned(self):
        """In-place views, results of factories (Python's binding copies them if they have another owner), and marks for a profiler."""
        class Views(Net):
            def act(self, h):
                rows = torch.arange(h.shape[0], dtype=h.dtype) + 1
                turned = (h * rows[:, None]).contiguous()
                turned.transpose_(0, 1)
                return turned.mean((0,), keepdim=True).squeeze_(0)[:, None] * h

        class Marked(Net):
            def act(self, h):
                with torch.profiler.record_function("act"):
                    return h.tanh()

        for make in (Views, Marked):
            with self.subTest(make.__name__), self.assertLogs("remat", logging.INFO) as seen:
                self.check(make)
            self.assertFalse([record for record in seen.records if record.levelno > logging.INFO])
            self.assertFalse([line for line in seen.output if "leaves the planned path" in line])

    def test_paths(self):
        """The state decides which path the forward takes."""
        for name, (make, read, change) in STATES.items():
            class Reads(Net):
                def begin(self):
                    make(self)

                def act(self, h):
                    return h.tanh() if float(read(self)) < 3.5 else h.relu() * 2

            def step(model, x, k):
                if k in (2, 4):
                    change(model, (2.0, 4.0)[k == 2])
                backward(model, x, k)

            with self.subTest(name):
                self.check(Reads, step, steps=6)

    def test_counters_and_lists(self):
        class Counts(Net):
            def begin(self):
                self.calls, self.list = 0, []

            def act(self, h):
                self.calls += 1
                self.list.append(self.calls)
                return h / self.calls

        self.assertEqual((lambda m: (m.calls, m.list))(self.check(Counts)), (5, [1, 2, 3, 4, 5]))

    def test_tensors_from_step_to_step(self):
        class Keeps(Net):
            def begin(self):
                self.h = None

            def act(self, h):
                y = h.tanh() if self.h is None else (h + self.h).tanh()
                self.h = y.detach()
                return y

        self.check(Keeps, lambda m, x, k: (backward(m, x, k), [m.h])[1])

    def test_values(self):
        """Reads of values that prevent a plan. For all others see follow_values.py."""
        class Sparse(Net):
            def act(self, h):
                return h.tanh() + h.detach().to_sparse().to_dense()

        class Scatters(Net):
            def act(self, h):
                return h.masked_scatter(h.detach() > 0.5, h.tanh().flatten()) * 2

        for kind in (Sparse, Scatters):
            with self.subTest(kind.__name__), self.assertLogs("remat", logging.WARNING) as seen:
                self.check(kind, plans=False)
                self.assertEqual(len(seen.output), 1)

    def test_arguments(self):
        class Strange(Net):
            def forward(self, x, *rest):
                rest[0]["y"] = super().forward(x)
                return rest[0]["y"]

        for other in (object(), lambda: 1, torch.Generator(), io.StringIO()):
            def step(model, x, k):
                batch = {"x": x, "other": other}
                model(x, batch).sum().backward()
                self.assertEqual(list(batch), ["x", "other", "y"])

            self.check(Strange, step)

    def test_layers_that_are_left_out(self):
        class Drops(Net):
            def act(self, h):
                for _ in range(3):
                    if torch.rand(()).item() < 0.5:
                        h = self.norm(h).tanh()
                return h

        self.check(Drops, steps=8)

    def test_forward_hooks(self):
        def step(model, x, k):
            seen = []
            handle = model.first.register_forward_hook(lambda m, a, y: (seen.append(k), y * (k + 1))[1])
            backward(model, x, k)
            handle.remove()
            self.assertEqual(seen, [k])

        self.check(Net, step)

    def test_exceptions(self):
        class Raises(Net):
            def act(self, h):
                if self.fails:
                    raise LookupError("as it is")
                return h.tanh()

        def step(model, x, k):
            model.fails = k in (0, 3)
            with self.assertRaisesRegex(LookupError, "as it is") if model.fails else contextlib.nullcontext():
                model(x).sum().backward()

        self.check(Raises, step)

    def test_checkpoints_inside(self):
        for reentrant in (False, True):
            class Segments(Net):
                def act(self, h):
                    for _ in range(2):
                        h = checkpoint(lambda t: self.drop(t.tanh()), h, use_reentrant=reentrant)
                    return h

            with self.subTest(reentrant=reentrant), self.assertNoLogs("remat", logging.WARNING):
                self.check(Segments)


if __name__ == "__main__":
    unittest.main()
