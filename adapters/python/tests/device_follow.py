# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of followed steps on the device of REMAT_TEST_DEVICE. With --host, weights stay in host memory."""

import sys
import time
import unittest

import emulated
import torch
from devices import DEVICE

import follow
import follow_autocast
import follow_backwards
import follow_calls
import follow_gradients
import follow_hooks
import follow_memory
import follow_paths
import follow_sums
import follow_values
import follow_zeros
import following
import remat

HOST = "--host" in sys.argv
MODULES = follow, follow_autocast, follow_backwards, follow_calls, follow_values, follow_zeros, follow_sums, follow_gradients, follow_hooks, follow_memory, follow_paths

#: Tests that do not apply on a device, with the reason.
ELSEWHERE = {
    "test_memory_written_without_operators": "numpy writes memory of the host",
    "test_memory_of_what_runs_as_it_is": "the meter counts memory of the host, and there are no sparse tensors",
    "test_memory_within_a_budget": "the meter counts memory of the host",
    "test_a_path_beyond_the_budget_is_searched_once": "all budgets are the same there",
    "test_arrays": "numpy reads memory of the host",
    "test_several_threads_replace_them": "a default device is one of a thread",
    "test_several_threads_add_to_them": "the same",
    "test_threads_one_after_another": "the same",
    "test_threads": "the same; devices.py has threads of its own",
    "test_lengths_that_nobody_uses": "lengths are on the host",
}
if HOST:
    ELSEWHERE |= {
        "test_graph_of_gradients": "an error, see `test_refusals`",
        "test_gradients_of_parameters": "hooks inside of the model do not see gradients of weights on the host (docs/limits.md)",
        "test_meta_learning": "the same",
        "test_other_backwards": "its last part is the same",
        "test_verified": "verify needs weights that stay on the device",
        "test_around": "checkpoints around a module whose weights are elsewhere keep what they are given",
        "test_other_parameters_in_each_call": "parameters that are replaced are on the device",
        "test_other_parameters_beside_views_of_the_first": "views of weights stay where these were",
    }
if emulated.is_emulated:
    ELSEWHERE |= dict.fromkeys(("test_what_cannot_be_recorded", "test_named", "test_values"), "no sparse tensors")
    ELSEWHERE |= {"test_scripted_functions": "no compiler of kernels"} if DEVICE.type == "cuda" else {}


def trained(make, step, steps, wrap):
    """Like `following.trained`, on the device."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)  # equal arithmetic on host and device
    if wrap is not None:
        there = {"device": DEVICE, "offload": "all", "budget": "100% of activations"} if HOST else {"budget": "100% of activations"}
        remat.wrap(model, **{**wrap, "time_limit": 1, "gap": 0.9, "cache": False, **there})
    return model, following.left_by_steps(model, optimizer, step, steps)


class WithHost(following.Test):
    def test_refusals(self):
        """A graph of gradients is refused, because it would need weights on the device after its step. The next step is planned."""
        model = remat.wrap(following.Net(), device=DEVICE, offload="all", cache=False)
        x = torch.randn(32, 16, requires_grad=True)
        with self.assertRaisesRegex(RuntimeError, "would need weights on the device for longer than this step"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        model(x).sum().backward()

    def test_weights_that_the_forward_writes(self):
        def written(model):
            with torch.no_grad():
                model.last.weight.mul_(0.9)
                model.norm.bias.data.clamp_(-0.01, 0.01)

        class Writes(following.Net):
            def act(self, h):
                written(self)
                return h.tanh()

        class Looks(following.Net):
            def act(self, h):
                written(self)
                return h * (1 if h.mean().item() > 0 else -1)

        class Unplanned(following.Net):
            def act(self, h):
                written(self)
                self.norm.weight.requires_grad = not self.norm.weight.requires_grad
                self.last.bias.data = self.last.bias.data.detach() * 0.9
                return h.tanh()

        for make in Writes, Looks, Unplanned:
            with self.subTest(make.__name__):
                self.check(make)

    def test_penalties_beside(self):
        """The backward of a penalty on a weight must not run while weights are disguised as tensors of the device."""
        class Slow(torch.autograd.Function):
            """A function with a slow custom backward. The backward is compared with the plan; in step 3 it reads a value, so no plan applies."""

            @staticmethod
            def forward(ctx, h, at):
                ctx.at = at
                return h.clone()

            @staticmethod
            def backward(ctx, g):
                time.sleep(0.2)
                return (g.sum().item() * g if ctx.at == 3 else g), None

        class Penalty(torch.autograd.Function):
            """A penalty whose backward checks that the device of the weight does not change."""

            @staticmethod
            def forward(ctx, weight):
                ctx.weight, ctx.device = weight, weight.device
                return weight.square().sum()

            @staticmethod
            def backward(ctx, g):
                for _ in range(40):
                    moved.append(ctx.weight.device != ctx.device)
                    time.sleep(0.005)
                return 2 * ctx.weight * g

        class Model(following.Net):
            at = 0

            def forward(self, x):
                h = Slow.apply(self.first(x), self.at)
                return self.last(h.relu()), h

        def step(model, x, k):
            model.at = k
            out, h = model(x)
            loss = Penalty.apply(model.first.weight).to(DEVICE) + out.square().mean()
            (loss + h.square().mean() if k > 3 else loss).backward()

        moved = []
        self.check(Model, step, steps=6)
        self.assertEqual(set(moved), {False})


def main():
    torch.backends.mha.set_fastpath_enabled(False)  # PyTorch's choice of the fast path depends on the place of the weights
    torch.set_default_device(DEVICE)
    del follow_paths.PARTS["by hand"], follow_memory.OTHERS[follow_memory.of_an_array], follow_memory.STORAGES["bytes in another order"]  # of the host
    if HOST:  # two threads run a backward, so the order of more than two summands is not fixed
        follow_memory.OTHERS.update(dict.fromkeys(follow_memory.OTHERS, False))  # weights share their memory
        follow_sums.STEPS[follow_sums.Tied].remove(follow_sums.penalty_before)
        follow_sums.STEPS[follow_sums.Attention].remove(follow_sums.parts_of_one)
        follow_sums.OPTIONS.remove({"verify": 2})  # verify needs weights that stay on the device
    if DEVICE.type == "cuda":  # CUDA's backwards of these operators do not ask for zeros
        for name in ("max", "min", "median", "nanmedian"):
            del follow_zeros.ASKING[name]
    suite, loader = unittest.TestSuite(), unittest.TestLoader()
    cases = {case for module in MODULES for case in vars(module).values()
             if isinstance(case, type) and issubclass(case, unittest.TestCase)} | ({WithHost} if HOST else set())
    following.Test.counts_plans = False  # other steps are planned there
    for module in (following, *MODULES):
        module.trained = trained
    for case in sorted(cases, key=lambda case: case.__qualname__):
        suite.addTests(test for test in loader.loadTestsFromTestCase(case) if test.id().rpartition(".")[2] not in ELSEWHERE)
    sys.exit(not unittest.TextTestRunner().run(suite).wasSuccessful())


if __name__ == "__main__":
    main()
