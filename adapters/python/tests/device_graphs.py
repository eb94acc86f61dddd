# SPDX-License-Identifier: Apache-2.0
"""Steps captured as graphs on the device of REMAT_TEST_DEVICE: failed captures, freed gradients, several threads, draws of other threads."""

import threading
import warnings

import emulated
import torch
from devices import DEVICE, Gpt

import remat

TIGHT = {"budget": "50% of activations"}
CAPTURED = 2  # index of the captured step: the first learns that hooks free gradients, the second runs kernel by kernel
OFFLOAD = {"budget": "80% of activations", "offload": "activations"}


class Incident:
    """A function that the next call of `incident` runs once."""

    what = None


@torch.library.custom_op("remat_test::incident", mutates_args=())
def incident(x: torch.Tensor) -> torch.Tensor:
    """Runs the pending incident, then returns a copy of x."""
    what, Incident.what = Incident.what, None
    if what is not None:
        what(x)
    return x.clone()


incident.register_fake(lambda x: torch.empty_like(x))
incident.register_autograd(lambda context, g: incident(g))


def raises(x):
    raise RuntimeError("the operator fails")


def waits(x):
    x.sum().item()


def hides(x):
    """A wait invalidates the capture, even if the operator hides the error."""
    try:
        waits(x)
    except RuntimeError:
        pass


def draws(x):
    """Another thread draws from the default generator."""
    other = threading.Thread(target=lambda: torch.rand(100, device=DEVICE))
    other.start()
    other.join()


@torch.library.custom_op("remat_test::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    """Random numbers. The pending incident runs before the draw, or after the draw if it is ("after", incident)."""
    Noise.calls += 1
    what, Incident.what = Incident.what, None
    after = isinstance(what, tuple)
    if what is not None and not after:
        what(x)
    numbers = torch.rand_like(x)
    if after:
        what[1](x)
    return numbers


noise.register_fake(lambda x: torch.empty_like(x))


class Noise(torch.nn.Module):
    """Random factors, which the backward draws again if memory is short. The gradient of the weight shows the factors of the backward."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(64, 64) + 1)

    def forward(self, x):
        y = x * self.weight * noise(x)
        z = y
        for _ in range(8):
            z = torch.sin(z)
        return y.detach(), z.sum() * 0 + y.sum()


class Eventful(torch.nn.Module):
    """Dropouts around an incident, a weight whose gradient is large enough to be freed early, and two outputs."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.before = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Dropout(dropout))
        self.after = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(dropout), torch.nn.Linear(64, 32))

    def forward(self, x):
        h = incident(self.before(x))
        y = self.after(h)
        return h.square().mean(), (y - x).square()


def step_and_free(p):
    with torch.no_grad():
        p.sub_(p.grad, alpha=0.1)
    p.grad = None


def train(options, incidents=None, dropout=0.1, seed=1, steps=5, seeded=True):
    """Trains with hooks that step each parameter as soon as its gradient is complete. Returns (model, outputs and parameters).

    incidents: incidents by (index of the step, "forward" or "backward").
    """
    rng = torch.Generator().manual_seed(seed)
    model = Eventful(dropout)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=rng) * 0.2)
    data = [torch.randn(128, 32, generator=rng).to(DEVICE) for _ in range(steps)]
    model = model.to(DEVICE)
    if options is not None:
        remat.wrap(model, cache=False, time_limit=2, gap=0.9, **options)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_and_free)
    if seeded:
        torch.manual_seed(2)
    left = []
    for k, x in enumerate(data):
        for half in ("forward", "backward"):
            Incident.what = (incidents or {}).get((k, half), Incident.what)
            if half == "forward":
                first, second = model(x)
                loss = first + second.mean()
            else:
                loss.backward()
            assert Incident.what is None or not incidents, "no incident"
        left += [first.detach(), second.detach()]
    return model, [t.detach().cpu() for t in (*left, *model.parameters())]


def planned(options, incidents=None, **more):
    """Like `train` with graph=True. Also returns the warnings about failed captures."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model, left = train({"graph": True, **options}, incidents, **more)
    return model, left, [str(w.message) for w in told if "not captured" in str(w.message)]


def state():
    return torch.get_device_module(DEVICE).get_rng_state()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_gradients_that_leave():
    """Hooks free gradients one by one. The graphs are split at these hooks."""
    _, plain = train(None, steps=8)
    after = state()
    for options in ({}, OFFLOAD, {"budget": "80% of activations"}):
        for late in (0, 50):
            emulated.set_option("late", late)
            model, left, told = planned(options, steps=8)
            emulated.set_option("late", 0)
            assert "gradients leave" in remat.of(model).plan["inputs"], remat.of(model).plan["inputs"]
            assert same(plain, left) and torch.equal(after, state()) and not told, (options, late, told)


def check_hooks_inside():
    """Hooks inside of the forward look at values, so such steps are not captured."""
    def trained(options):
        torch.manual_seed(1)
        model, seen = Eventful().to(DEVICE), []
        model.after[0].register_forward_hook(
            lambda m, i, o: (o.register_hook(lambda g: seen.append(g.norm().item()) or g * 0.5), None)[1])
        if options is not None:
            remat.wrap(model, cache=False, time_limit=2, gap=0.9, graph=True, **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        for _ in range(4):
            first, second = model(torch.randn(128, 32, device=DEVICE))
            optimizer.zero_grad()
            (first + second.mean()).backward()
            optimizer.step()
        return [torch.tensor(seen), *(p.detach().cpu() for p in model.parameters()), state()]

    plain = trained(None)
    for options in ({}, {"offload": "activations"}):
        assert same(plain, trained({"budget": "100% of activations", **options})), options


def check_failures_within_captures():
    """After a failed capture, the step ends with the results of eager mode, one warning names the cause, and the next model is captured."""
    _, plain = train(None)
    after = state()
    for what, why in ((raises, "the operator fails"), (waits, ""), (hides, "")):
        for half in ("forward", "backward"):
            for options in ({}, OFFLOAD):
                _, left, told = planned(options, {(CAPTURED, half): what})
                where = (what.__name__, half, options, told)
                assert same(plain, left) and torch.equal(after, state()), where
                assert len(told) == 1 and "remat_test::incident" in told[0] and why in told[0], where
                torch.accelerator.synchronize()  # would fail if the capture had not ended
    _, left, told = planned({})
    assert same(plain, left) and not told, told


def check_threads():
    """Several threads train their own captured models on one device."""
    count = 4
    plain = [train(None, dropout=0.0, seed=k, seeded=False)[1] for k in range(count)]
    found, failures = {}, []

    def work(k):
        try:
            with torch.device("cpu"):
                found[k] = train({"graph": True, **(OFFLOAD if k % 2 else {})}, dropout=0.0, seed=k, seeded=False)[1]
        except BaseException as e:  # raised again in the main thread
            failures.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(count)]
    for late in (0, 50):
        emulated.set_option("late", late)
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        emulated.set_option("late", 0)
        if failures:
            raise failures[0]
        assert all(same(plain[k], found[k]) for k in range(count)), late
        threads = [threading.Thread(target=work, args=(k,)) for k in range(count)]


def check_draws_of_other_threads():
    """A draw of another thread within a step advances the generator as in eager mode. remat never rolls it back."""
    for when in ({(0, "forward"): draws}, {(0, "backward"): draws}, {(3, "forward"): draws, (4, "backward"): draws}):
        _, plain = train(None, when)
        after = state()
        for options in ({}, {"budget": "80% of activations"}, OFFLOAD):
            _, left = train(options, when)
            first = min(when)[0] == 0  # the draw happened during the capture for planning, before the step itself
            assert (first or same(plain, left)) and torch.equal(after, state()), (when, options)


def check_draws_beside_draws():
    """A recomputed draw repeats its first numbers, even if another thread draws right before or after it."""

    def noisy(options):
        torch.manual_seed(1)
        model, x = Noise().to(DEVICE), torch.rand(64, 64, device=DEVICE) + 1
        return model if options is None else remat.wrap(model, cache=False, time_limit=2, gap=0.9, **options), x

    def last_step(options, half, what):
        model, x = noisy(options)
        for k in range(4):
            model.zero_grad()
            if k == 3 and half == "forward":
                Incident.what = what
            calls = Noise.calls
            y, loss = model(x)
            if k == 3 and half == "backward":
                Incident.what = what if options is not None else None  # plain backwards do not draw
            loss.backward()
            calls = Noise.calls - calls
        if options is None and half == "backward":
            draws(x)
        assert Incident.what is None and (options is None or calls > 1), (half, what, calls)
        assert torch.allclose(model.weight.grad * model.weight, y), (half, what)
        return [y.cpu(), model.weight.grad.cpu(), state()]

    for what in (draws, ("after", draws)):
        assert same(last_step(None, "backward", what), last_step(TIGHT, "backward", what)), what
        last_step(TIGHT, "forward", what)
    # The first run of an executor does not yet know how many numbers a node draws, so a draw of another thread ends the step with an error.
    model, x = noisy(TIGHT)
    model(x)[1].backward()
    remat.of(model).release()
    Incident.what = draws
    _, loss = model(x)
    try:
        loss.backward()
    except RuntimeError as e:
        assert "another thread used the random generator" in str(e) and "remat_test::noise" in str(e), e
    else:
        raise AssertionError("other numbers")
    model.zero_grad()
    y, loss = model(x)
    loss.backward()
    assert torch.allclose(model.weight.grad * model.weight, y)


if __name__ == "__main__":
    emulated.run_checks(globals(), "kinds of captured steps")
