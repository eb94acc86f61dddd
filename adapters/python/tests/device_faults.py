# SPDX-License-Identifier: Apache-2.0
"""Faults around planned steps on a device. Each fault is handled, or raises an error that names it, and training goes on with correct results."""

import gc
import re
import threading
import warnings

import emulated
import torch
from devices import DEVICE, Gpt

import remat

IDS = torch.randint(0, 50, (8, 16))


def raises(kind, text, what):
    try:
        what()
    except kind as e:
        assert text in str(e), e
    else:
        raise AssertionError(f"no {kind.__name__}: {text}")


def wrapped(**options):
    torch.manual_seed(1)
    return remat.wrap(Gpt().to(DEVICE), cache=False, time_limit=2, gap=0.9, **options)


def check_workspaces():
    """The first matrix product of the process runs in a plan. The workspaces of both threads are allocated before, and are counted."""
    model, x = torch.nn.Linear(64, 64).to(DEVICE), torch.randn(8, 64, device=DEVICE)
    before = torch.accelerator.memory_allocated()
    remat.wrap(model, cache=False)
    for _ in range(3):
        model.zero_grad()
        model(x).sum().backward()
    memory = remat.of(model).memory()
    assert not emulated.is_emulated or memory["workspaces"] == 2 * emulated.get_option("workspace"), memory
    model.zero_grad()
    remat.of(model).release()
    assert torch.accelerator.memory_allocated() == before + memory["workspaces"], memory


def check_two_devices():
    other = torch.device(DEVICE.type, 1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8).to(DEVICE), torch.nn.Linear(8, 8).to(other))
    raises(remat.Refused, "two devices", lambda: remat.wrap(model, cache=False, on_refuse="raise")(torch.randn(2, 8, device=DEVICE)))


def check_draws_of_the_host():
    class Noisy(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.rand(4).to(x.device)

    raises(remat.Refused, "rand", lambda: remat.wrap(Noisy(4, 4).to(DEVICE), cache=False, on_refuse="raise")(torch.randn(2, 4, device=DEVICE)))


def check_foreign_graph():
    model, ids = wrapped(), IDS.to(DEVICE)
    model(ids).backward()
    torch.accelerator.synchronize()
    side = torch.Stream(DEVICE)
    graph = torch.accelerator.Graph()
    with side:
        graph.capture_begin()
        try:
            raises(remat.Error, "a graph is being captured", lambda: model(ids))
        finally:
            graph.capture_end()
    model.zero_grad()
    model(ids).backward()  # training goes on


def check_results_on_another_stream():
    """Memory of an output or gradient is not reused while another stream reads it."""
    for of in (lambda model, x, y: [y.detach(), x.grad], lambda model, x, y: [p.grad for p in model.parameters()]):
        emulated.set_option("late", 300)
        model = remat.wrap(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).to(DEVICE), cache=False)
        side, x = torch.Stream(DEVICE), torch.randn(32, 64, device=DEVICE, requires_grad=True)
        sums, wanted = [], []
        for _ in range(4):
            y = model(x)
            y.sum().backward()
            results = of(model, x, y)
            wanted += [t.sum() for t in results]
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                for _ in range(8):
                    torch.add(x, x)
                sums += [t.sum() for t in results]
            for t in results:
                t.record_stream(side)
            del y, t, results
            x.grad = None
            model.zero_grad()
            torch.full((32, 64), 7.0, device=DEVICE)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
        torch.accelerator.synchronize()
        emulated.set_option("late", 0)
        assert [t.item() for t in sums] == [t.item() for t in wanted]
        assert emulated.races() == 0, emulated.race_reports()


def gradients(model):
    """Gradients of a step with many rows, because CUDA's allocator rounds large requests relatively less."""
    torch.manual_seed(3)
    model(torch.randint(0, 50, (300, 16), generator=torch.Generator().manual_seed(5)).to(DEVICE)).backward()
    return [p.grad.cpu() for p in model.parameters()]


def check_memory_of_others():
    """Another process takes memory. The step is planned once more for less memory, with one warning."""
    model = wrapped(budget="8 GiB")
    plain = gradients(model)
    arena = remat.of(model).memory()["arena"]
    model.zero_grad()
    remat.of(model).release()
    torch.accelerator.empty_cache()
    free, _ = torch.accelerator.get_memory_info(DEVICE)
    emulated.take(0, free - arena * 3 // 4)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            planned = gradients(model)
    finally:
        emulated.take(0, 0)
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    assert remat.of(model).memory()["arena"] < arena
    assert [w for w in told if "another process may use it" in str(w.message)], [str(w.message) for w in told]


def check_memory_fraction():
    """Steps are planned for PyTorch's memory limit of this process. Budgets in % of the device are shares of this limit."""
    if DEVICE.type != "cuda":
        return  # only CUDA has this limit
    model = wrapped()
    plain = gradients(model)
    arena = remat.of(model).memory()["arena"]
    model.zero_grad()
    remat.of(model).release()
    torch.accelerator.empty_cache()
    reserved, total = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
    allowed = reserved + arena * 3 // 4
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            planned = gradients(model)
        whole = wrapped(budget="100% of device")
        whole(IDS.to(DEVICE))
        budget = remat.of(whole).memory()["budget"]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    assert remat.of(model).memory()["arena"] < arena
    assert [w for w in told if "has only" in str(w.message)], [str(w.message) for w in told]
    assert budget <= allowed, (budget, allowed)


def check_idle_arenas():
    """PyTorch runs out of memory. Idle arenas, kept for the next step, are freed, and the allocation succeeds."""
    model = wrapped()
    gradients(model)
    model.zero_grad()
    arena = remat.of(model).memory()["arena"]
    torch.accelerator.empty_cache()
    free, _ = torch.accelerator.get_memory_info(DEVICE)
    emulated.take(0, free - arena // 2)
    try:
        torch.empty(arena - 4096, dtype=torch.uint8, device=DEVICE)
    finally:
        emulated.take(0, 0)
    model(IDS.to(DEVICE)).backward()


def check_arenas_of_later_steps():
    """Steps that accumulate gradients, and batches of several sizes, share an arena. Later steps do not call CUDA's allocator, because each
    call would wait for all kernels."""
    if DEVICE.type != "cuda":
        return  # other devices do not count calls of the allocator
    for batches in ((300, 300, 300), (300, 200)):
        model, seen = wrapped(budget="100%"), []
        for _ in range(6):
            for rows in batches:
                model(torch.randint(0, 50, (rows, 16)).to(DEVICE)).backward()
            model.zero_grad()
            seen.append(torch.cuda.memory_stats()["num_device_alloc"])
        assert len(set(seen[2:])) == 1, (batches, seen)
        del model


def check_first_step_beside_a_backward():
    """A step is recorded while a backward occupies the device thread and waits for the recording thread."""
    ids, ready, held, ended = IDS.to(DEVICE), *(threading.Event() for _ in range(3))
    in_time = []

    def other():
        wrapped()(ids)  # allocates the workspaces of libraries
        ready.set()
        held.wait(120)
        for follow in (True, False):
            wrapped(follow=follow)(ids)
        ended.set()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait(120)
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: held.set() or in_time.append(ended.wait(120)))
    y.sum().backward()
    thread.join()
    assert in_time == [True], "the recording waited for the thread of the device"


def check_lost_device():
    """The error for a lost device is one sentence. Models on the host go on."""
    if not emulated.is_emulated:
        return  # a real device would stay lost
    model, ids, host = wrapped(), IDS.to(DEVICE), remat.wrap(Gpt(), cache=False)
    host(IDS).backward()
    for _ in range(2):
        model(ids).backward()
    loss = model(ids)
    loss.register_hook(lambda g: emulated.set_option("lost", 1))
    sentence = rf"{DEVICE} does not work any more \([^\n]*\); start the program again, or go on with the model on the host"
    try:
        for kind, what in ((RuntimeError, loss.backward), (remat.DeviceLost, lambda: model(ids)),
                           (remat.DeviceLost, lambda: remat.wrap(Gpt(), device=DEVICE, offload="all", cache=False))):
            try:
                what()
            except kind as e:
                assert re.fullmatch(sentence, str(e)), e
            else:
                raise AssertionError("a step on a device that is lost")
        assert all("\n" not in d["problem"] for d in remat.devices()), remat.devices()
        host(IDS).backward()
    finally:
        emulated.set_option("lost", 0)
        emulated.reset()


def check_settings():
    """A change of a setting that selects kernels leads to another plan."""
    before = torch.are_deterministic_algorithms_enabled()
    model, ids = wrapped(), IDS.to(DEVICE)
    plans = set()
    for on in (False, True, False):
        torch.use_deterministic_algorithms(on)
        model.zero_grad()
        model(ids).backward()
        plans.add(len(remat.of(model).plans))
    torch.use_deterministic_algorithms(before)
    assert plans == {1, 2}, plans
    if DEVICE.type != "cuda":
        return
    cuda = torch.backends.cuda
    for settings, name, other in ((torch.backends.cudnn, "benchmark", True), (cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
                                  (cuda.matmul, "fp32_precision", "tf32")):
        number, was = len(remat.of(model).plans), getattr(settings, name)
        setattr(settings, name, other)
        model.zero_grad()
        model(ids).backward()
        setattr(settings, name, was)
        assert len(remat.of(model).plans) == number + 1, name


if __name__ == "__main__":
    emulated.run_checks(globals(), "kinds of trouble")
