# SPDX-License-Identifier: Apache-2.0
"""Training on the device of REMAT_TEST_DEVICE with weights in host memory equals plain training on this device bit by bit."""

import gc
import io
import logging
import sys
import tempfile
import threading

import emulated
import torch
from devices import DEVICE, Conv, Gpt

import remat


def train(make, sample, wrapped, steps=4, passes=1, stepped=None, told=None):
    """Trains a model. Returns losses, parameters, buffers and the state of the generator.

    wrapped: options of `remat.wrap`, or None for plain training on the device.
    passes: number of backwards whose gradients accumulate before each step of the optimizer.
    stepped: options of `remat.optimizer`, or None for a plain optimizer.
    told: a dictionary that receives the memory figures of the session, and the bytes of states on a disk.
    """
    gc.collect()
    torch.manual_seed(1)
    model, x = make(), sample()
    before = torch.accelerator.memory_allocated()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if wrapped is None:
        model, x = model.to(DEVICE), x.to(DEVICE)
    else:
        remat.wrap(model, device=DEVICE, offload="all", cache=False, time_limit=5, gap=0.9, **wrapped)
        assert all(torch.equal(p, weights[name]) and p.device.type == "cpu" for name, p in model.named_parameters())
    torch.manual_seed(2)
    arithmetic = {"lr": 0.01, "foreach": False}  # equal arithmetic on host and device
    if stepped is None:
        optimizer = torch.optim.AdamW(model.parameters(), **arithmetic)
    else:
        optimizer = remat.optimizer(model.parameters(), torch.optim.AdamW, model=model, **stepped, **arithmetic)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    losses = []
    for k in range(steps):
        if k == 1:  # the first step captures and profiles
            torch.accelerator.reset_peak_memory_stats()
        optimizer.zero_grad()
        for _ in range(passes):
            loss = model(x)
            loss.backward()
        if wrapped is not None and (stepped or {}).get("step") != "overlap":
            assert all(p.grad.device.type == "cpu" for p in model.parameters())
        optimizer.step()
        schedule.step()
        losses.append(loss.detach().cpu())
    if wrapped is not None:
        memory = remat.of(model).memory()
        assert torch.accelerator.max_memory_allocated() - before <= memory["budget"], (memory, before, torch.accelerator.max_memory_allocated())
        assert memory["fetched"] > 0, memory
        if told is not None:
            told.update(memory, states=optimizer.memory()["disk"])
        model.eval()
        with torch.no_grad():
            losses.append(model(x))
        model.train()
        assert set(model.state_dict()) >= set(weights)
    else:
        model.eval()
        with torch.no_grad():
            losses.append(model(x))
    left = [t.detach().cpu() for t in [*losses, *model.parameters(), *model.buffers()]]
    return [*left, torch.get_device_module(DEVICE).get_rng_state()]


def check_refusals():
    model = torch.nn.Linear(64, 64)
    for options, why in (({"offload": "none"}, 'needs offload="all"'), ({"graph": True}, "stay on the device"), ({"verify": 1}, "stay on the device"),
                         ({"host_budget": 1000}, "less than the 16640 bytes of the weights"),
                         ({"host_budget": 1000, "disk": "/tmp"}, "less than the 16640 bytes of the gradients"), ({"device": "cpu"}, "accelerator")):
        try:
            remat.wrap(model, **{"device": DEVICE, "offload": "all", **options})
        except ValueError as e:
            assert why in str(e), e
        else:
            raise AssertionError(options)


def check_other_options():
    """A model that is wrapped again without a device trains on the host."""
    model, x = Conv(), torch.randn(4, 3, 24, 24)
    remat.wrap(model, device=DEVICE, offload="all", cache=False)(x).backward()
    assert {b.device.type for b in model.buffers()} == {DEVICE.type}
    remat.wrap(model, cache=False)(x).backward()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}


def check_optimizers():
    """The optimizer steps during the backward, on the device, on the host, and with states on a disk."""
    make, sample = Gpt, lambda: torch.randint(0, 50, (8, 16))
    compared = 0
    for passes in (1, 2):
        plain = train(make, sample, None, passes=passes)
        for stepped in ({"step": "overlap", "accumulate": passes}, {"where": "device"}, {"where": "host"}, {}):
            emulated.set_option("late", 50)
            planned = train(make, sample, {"budget": "70% of activations"}, passes=passes, stepped=stepped)
            emulated.set_option("late", 0)
            assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True)), (passes, stepped)
            assert emulated.races() == 0, emulated.race_reports()
            compared += 1
    for passes, stepped in ((2, {"step": "overlap"}), (1, {"step": "overlap", "accumulate": 2, "where": "device"})):
        try:
            train(make, sample, {}, passes=passes, stepped=stepped)
        except (remat.Refused, ValueError) as e:
            assert "accumulate" in str(e) or "where" in str(e), e
        else:
            raise AssertionError((passes, stepped))
    return compared


def check_checkpoints():
    """Training resumes from a saved state with or without weights on the host, also with clipped gradients."""
    x = torch.randint(0, 50, (8, 16))

    def half(there, stepped, clip, saved=None):
        """Trains two steps from a saved state. Returns the new saved state. there: True for weights on the host."""
        torch.manual_seed(1)
        model = Gpt()
        if there:
            remat.wrap(model, device=DEVICE, offload="all", cache=False, time_limit=5, gap=0.9, budget="70% of activations")
            optimizer = remat.optimizer(model.parameters(), torch.optim.AdamW, model=model, lr=0.01, foreach=False, **stepped)
        else:
            optimizer = torch.optim.AdamW(model.to(DEVICE).parameters(), lr=0.01, foreach=False)
        if saved is not None:
            was = torch.load(io.BytesIO(saved), map_location="cpu")
            model.load_state_dict(was["model"])
            optimizer.load_state_dict(was["optimizer"])
        torch.manual_seed(2)
        for _ in range(2):
            optimizer.zero_grad()
            model(x.to(DEVICE)).backward()
            if clip:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
                assert norm > 0.1, norm
            optimizer.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return file.getvalue()

    def tensors(saved):
        found = torch.load(io.BytesIO(saved), map_location="cpu")
        states = [t for state in found["optimizer"]["state"].values() for t in state.values()]
        return [*found["model"].values(), *states]

    for stepped, clip in (({"where": "host"}, True), ({"where": "device"}, True), ({"step": "overlap"}, False)):
        plain = tensors(half(False, stepped, clip, half(False, stepped, clip)))
        for first, second in ((True, True), (True, False), (False, True)):
            then = tensors(half(second, stepped, clip, half(first, stepped, clip)))
            assert all(torch.equal(a, b) for a, b in zip(plain, then, strict=True)), (stepped, first, second)


def check_steps_beside():
    """With step="overlap", parameters step while half of the gradients are still on the device."""
    if not emulated.is_emulated:
        return
    torch.manual_seed(1)
    model, x = remat.wrap(Gpt(), device=DEVICE, offload="all", cache=False, time_limit=5, gap=0.9), torch.randint(0, 50, (8, 16))
    optimizer = remat.optimizer(model.parameters(), torch.optim.SGD, model=model, step="overlap", lr=0.1)
    copies, stepped = 0, []
    stuck = threading.Timer(120, emulated.set_option, ("hold", 0))  # releases the copies, in case the step waits for all gradients

    def look(p):
        stepped.append(emulated.get_option("hold"))  # 1: copies are held back
        emulated.set_option("hold", 0)
    for k in range(3):
        optimizer.zero_grad()
        loss = model(x)
        if k == 2:
            emulated.set_option("hold", copies // 2)
            hooks = [p.register_post_accumulate_grad_hook(look) for p in model.parameters()]
            stuck.start()
        before = emulated.copies()
        loss.backward()
        copies = emulated.copies() - before
        optimizer.step()
    stuck.cancel()
    emulated.set_option("hold", 0)
    assert len(stepped) == len(hooks) and stepped[0] == 1, (stepped, copies)


def check_disk():
    """The smaller `host_budget` is, the more goes to a disk: optimizer states, activations and weights."""
    make, sample = Gpt, lambda: torch.randint(0, 50, (8, 16))
    weights = sum(p.nbytes for p in make().parameters())
    plain = train(make, sample, None)
    compared = 0
    with tempfile.TemporaryDirectory() as folder:
        for host_budget, in_files in ((10 * weights, False), (2 * weights, False), (weights + weights // 2, True)):
            for stepped in ({}, {"step": "overlap"}):
                told = {}
                planned = train(make, sample, {"budget": "60% of activations", "disk": folder, "host_budget": host_budget}, stepped=stepped, told=told)
                where = host_budget, stepped, told
                assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True)), where
                assert emulated.races() == 0, emulated.race_reports()
                assert (told["weights"] > 0) == in_files and told["states"] > 0, where
                assert told["disk"] == 0 or host_budget < 10 * weights, where
                compared += 1
    return compared


class Half(torch.autograd.Function):
    """Its backward reads a value."""

    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, g: g * (0.5 if g.isfinite().all().item() else 1.0))


class Refused(torch.nn.Module):
    """A model that cannot be planned, because its backward reads a value."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)
        self.head = torch.nn.Linear(64, 64)
        self.head.weight = self.body.weight

    def forward(self, x):
        return self.head(self.norm(Half.apply(self.body(x)))).square().mean()


def check_refused_calls():
    """With on_refuse="warn", a refused call runs on the device, with gradients. Only one weight at a time is on the device."""
    def run(wrapped):
        gc.collect()
        before = torch.accelerator.memory_allocated()
        torch.manual_seed(1)
        model, x = Refused(), torch.randn(8, 64)
        if wrapped:
            remat.wrap(model, device=DEVICE, offload="all", cache=False, on_refuse="warn")
        else:
            model, x = model.to(DEVICE), x.to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x)
            held = torch.accelerator.memory_allocated() - before
            loss.backward()
            optimizer.step()
        return [t.detach().cpu() for t in (loss, *model.parameters(), *model.buffers())], held
    logging.getLogger("remat").setLevel(logging.ERROR)
    (plain, all_held), (kept, held) = run(False), run(True)
    logging.getLogger("remat").setLevel(logging.WARNING)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))
    assert held <= all_held - Refused().body.weight.nbytes, (held, all_held)  # this weight is nearly all weights of the model
    model = remat.wrap(Refused(), device=DEVICE, offload="all", cache=False)
    with remat.of(model).paused():
        loss = model(torch.randn(8, 64))
        with torch.no_grad():
            model.body.weight.add_(1)
        try:
            loss.backward()
        except RuntimeError as e:
            assert "modified by an inplace operation" in str(e), e
        else:
            raise AssertionError("a weight was written between forward and backward")


def check_wrapped_again():
    """Wrapping again with other options leaves weights in place, unless the options name another place."""
    torch.manual_seed(1)
    model, x = Gpt(), torch.randint(0, 50, (8, 16))
    values = [p.detach().clone() for p in model.parameters()]
    room = sum(p.nbytes for p in values) * 3 // 2

    def wrap(**options):
        remat.wrap(model, device=DEVICE, offload="all", cache=False, time_limit=5, gap=0.9, **options)
        torch.manual_seed(2)
        return model(x).detach().cpu(), [p.data_ptr() for p in model.parameters()], remat.of(model).memory()["weights"]

    loss, before, _ = wrap()
    assert wrap(budget="80% of activations")[1] == before
    with tempfile.TemporaryDirectory() as folder:
        for options, in_files in (({"disk": folder, "host_budget": room}, True), ({}, False)):
            then, _, files = wrap(**options)
            assert torch.equal(then, loss) and (files > 0) == in_files, (options, files)
    remat.unwrap(model)
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))


def check_moved_weights():
    """Trainers call `model.to(device)`. The next step moves weights and gradients back to the host, and buffers to the device."""
    def left(there):
        torch.manual_seed(1)
        model, x = Conv(), torch.randn(4, 3, 24, 24)
        remat.wrap(model, device=DEVICE, offload="all", cache=False, time_limit=5, gap=0.9) if there else model.to(DEVICE)
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
        for move in (lambda: model.to(DEVICE), model.cpu) * 2:
            if there:
                move()
            model(x.to(DEVICE)).backward()
            if there:
                move()  # moves gradients, too
            model(x.to(DEVICE)).backward()
            assert not there or {t.device.type for p in model.parameters() for t in (p, p.grad)} == {"cpu"}
            optimizer.step()
            optimizer.zero_grad()
        return [t.detach().cpu() for t in (*model.parameters(), *model.buffers())]

    assert all(torch.equal(a, b) for a, b in zip(left(False), left(True), strict=True))


def check_lost_gradient():
    """If the copy of a gradient fails, the error names the parameter."""
    if not emulated.is_emulated:
        return
    model, x = remat.wrap(Gpt(), device=DEVICE, offload="all", cache=False), torch.randint(0, 50, (8, 16))
    for _ in range(2):
        model(x).backward()
    found = False
    for job in range(1, 400):
        loss = model(x)
        emulated.set_option("fail", job)
        try:
            loss.backward()
            torch.accelerator.synchronize()
        except (remat.CopyFailed, RuntimeError) as e:
            found = found or "gradient of parameter layers" in str(e)
        emulated.set_option("fail", 0)
        emulated.reset()
        if found:
            return
    raise AssertionError("no failure named a parameter")


class Watched(torch.nn.Module):
    """Looks at a value in its forward, for which a large and a small weight are fetched ahead of the plan."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 4)
        self.seen = 0.0

    def forward(self, x):
        y = self.layer(x)
        self.seen = y.sum().item()
        return self.last(y.relu()).sum()


def check_short_memory():
    """If the device has no room for a weight, no copy of another weight stays there: a later step would take it for the weight."""
    if not emulated.is_emulated:
        return
    model, x = remat.wrap(Watched(), device=DEVICE, offload="all", cache=False, time_limit=5, gap=0.9), torch.ones(2, 2048)
    for _ in range(2):
        model(x).backward()
    remat.of(model).release()
    free, _ = torch.accelerator.get_memory_info(DEVICE)
    emulated.take(0, free - (8 << 20))
    try:
        model(x).backward()
        raise AssertionError("there was room for a weight of 16 MiB")
    except (torch.OutOfMemoryError, remat.NoSpace):
        pass
    emulated.take(0, 0)
    with torch.no_grad():
        model.layer.bias.fill_(1.0)
        model.layer.weight.zero_()
    model(x).backward()
    assert model.seen == 2 * 2048, model.seen


def main():
    torch.backends.mha.set_fastpath_enabled(False)  # PyTorch's choice of the fast path depends on the place of the weights
    check_refusals()
    check_other_options()
    check_wrapped_again()
    check_moved_weights()
    check_refused_calls()
    check_steps_beside()
    check_checkpoints()
    compared = check_optimizers() + check_disk()
    for make, sample, tight in ((Gpt, lambda: torch.randint(0, 50, (8, 16)), 70), (Conv, lambda: torch.randn(4, 3, 24, 24), 97)):
        for passes in (1, 2):
            plain = train(make, sample, None, passes=passes)
            for budget in ("100% of activations", f"{tight}% of activations"):
                for late in (0, 50):
                    emulated.set_option("late", late)
                    planned = train(make, sample, {"budget": budget}, passes=passes)
                    emulated.set_option("late", 0)
                    where = (make, budget, late, passes)
                    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True)), where
                    assert emulated.races() == 0, emulated.race_reports()
                    compared += 1
    check_lost_gradient()
    check_short_memory()
    print(f"{compared} trainings on {DEVICE} with weights of the host equal plain training")


if __name__ == "__main__":
    sys.exit(main())
