# SPDX-License-Identifier: Apache-2.0
"""Optimizers with their states on a disk: what they compute, what they leave, and what they say when there is no room."""

import copy
import errno
import io
import os
import pickle
import resource
import signal
import subprocess
import sys

import pytest
import torch

import remat
from compare import same

WIDTH = 96  # a weight has 36 KiB


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH),
                               torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))


def batch(i):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i))


def train(model, optimizer, steps=20, first=0, scheduler=None):
    for i in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(i)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def groups(model):
    return [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3}]


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


AS = {"disk": {"disk": "."}, "overlap": {"step": "overlap"}, "disk and overlap": {"disk": ".", "step": "overlap"}, "memory": {}}
ways = pytest.mark.parametrize("way", AS.values(), ids=AS.keys())

CLASSES = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}, True),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}, False),
    "AdamW, neither": (torch.optim.AdamW, {"lr": 1e-2, "fused": False}, False),
    "Adam, amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True, "weight_decay": 0.1}, True),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, True),
    "SGD without states": (torch.optim.SGD, {"lr": 1e-2}, True),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}, True),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5}, False),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}, False),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}, False),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}, False),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}, False),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}, False),
}


@ways
@pytest.mark.parametrize("kind", CLASSES)
def test_equal_bit_by_bit(kind, way):
    cls, options, fused = CLASSES[kind]
    plain, ours = net(), net()
    a = cls(groups(plain), **options, **({"fused": True} if fused else {}))
    b = remat.optimizer(groups(ours), cls, **options, **way)
    train(plain, a, scheduler=torch.optim.lr_scheduler.LambdaLR(a, lambda i: 1 / (1 + i)))
    train(ours, b, scheduler=torch.optim.lr_scheduler.LambdaLR(b, lambda i: 1 / (1 + i)))
    assert isinstance(b, cls) and isinstance(b, torch.optim.Optimizer)
    assert same(weights(ours), weights(plain))
    assert not same(weights(ours), weights(net()))
    assert same(b.state_dict(), a.state_dict())
    large = sum(t.nbytes for state in a.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.nbytes >= 4096)
    assert b.memory()["disk"] == (large if "disk" in way else 0)


@ways
@pytest.mark.parametrize("kind", ["bfloat16", "complex", "channels last", "double"])
def test_other_parameters(kind, way):
    def made():
        torch.manual_seed(4)
        if kind == "channels last":
            return torch.nn.Conv2d(8, 32, 5).to(memory_format=torch.channels_last), torch.randn(2, 8, 9, 9)
        if kind == "complex":
            return torch.nn.Linear(64, 64, dtype=torch.complex64), torch.randn(2, 64, dtype=torch.complex64)
        dtype = getattr(torch, {"double": "float64"}.get(kind, kind))
        return torch.nn.Linear(WIDTH, WIDTH, dtype=dtype), torch.randn(2, WIDTH, dtype=dtype)

    (plain, x), (ours, _) = made(), made()
    a = torch.optim.AdamW(plain.parameters(), 1e-2, fused=None if kind == "complex" else True)
    b = remat.optimizer(ours.parameters(), lr=1e-2, **way)
    for model, optimizer in ((plain, a), (ours, b)):
        for _ in range(5):
            optimizer.zero_grad()
            model(x).abs().square().mean().backward()
            optimizer.step()
    assert same(weights(ours), weights(plain))
    assert same(b.state_dict(), a.state_dict())
    assert (b.memory()["disk"] > 0) == ("disk" in way)


@ways
def test_types_mixed_in_a_group(way):
    """Adafactor has one epsilon for a group, that of the type of its first parameter."""
    def run(make):
        torch.manual_seed(4)
        layers = torch.nn.ModuleList((torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)))
        optimizer = make(layers.parameters())
        for i in range(4):
            optimizer.zero_grad()
            layers[1](layers[0](batch(i)).bfloat16()).float().square().mean().backward()
            optimizer.step()
        return weights(layers)

    assert same(run(lambda p: remat.optimizer(p, torch.optim.Adafactor, lr=1e-2, **way)), run(lambda p: torch.optim.Adafactor(p, 1e-2)))


@ways
@pytest.mark.parametrize("cls, options", [(torch.optim.SparseAdam, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {})])
def test_sparse_gradients(cls, options, way):
    plain, ours = (torch.nn.Embedding(256, 16, sparse=True) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    a, b = cls(plain.parameters(), lr=0.1, **options), remat.optimizer(ours.parameters(), cls, lr=0.1, **options, **way)
    for model, optimizer in ((plain, a), (ours, b)):
        for i in range(4):
            optimizer.zero_grad()
            model(torch.tensor([i, 7, 7])).square().sum().backward()
            optimizer.step()
    assert same(weights(ours), weights(plain))


@ways
def test_frozen_parameters_those_without_gradients_and_late_groups(way):
    def run(make):
        torch.manual_seed(2)
        layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        layers[3].requires_grad_(False)
        optimizer = make(list(layers[:2].parameters()))
        for i in range(9):
            if i == 2:
                optimizer.add_param_group({"params": list(layers[2:].parameters()), "lr": 1e-3})
            if i == 5:
                layers[3].requires_grad_(True)
            x = batch(i)
            for layer in layers if i % 3 else layers[1:]:
                x = layer(x)
            optimizer.zero_grad()
            x.square().mean().backward()
            optimizer.step()
        states = optimizer.state_dict()
        return weights(layers), states["param_groups"], sorted(states["state"].items())

    assert same(run(lambda p: remat.optimizer(p, lr=1e-2, **way)), run(lambda p: torch.optim.AdamW(p, 1e-2, fused=True)))


@ways
def test_state_dict_goes_into_the_plain_class_and_back(way):
    plain, ours = net(), net()
    a, b = torch.optim.AdamW(groups(plain), 1e-2, fused=True), remat.optimizer(groups(ours), lr=1e-2, **way)
    train(plain, a)
    train(ours, b, 10)
    saved = io.BytesIO()
    torch.save({"model": ours.state_dict(), "optimizer": b.state_dict()}, saved)
    middle = net()
    c = torch.optim.AdamW(groups(middle), 1)
    restored = torch.load(io.BytesIO(saved.getvalue()))
    middle.load_state_dict(restored["model"])
    c.load_state_dict(restored["optimizer"])
    train(middle, c, 5, first=10)
    last = net()
    last.load_state_dict(middle.state_dict())
    d = remat.optimizer(groups(last), lr=1, **way)
    d.load_state_dict(copy.deepcopy(c.state_dict()))
    assert d.memory()["disk"] == b.memory()["disk"]
    train(last, d, 5, first=15)
    assert same(weights(last), weights(plain))
    assert same(d.state_dict(), a.state_dict())


@ways
def test_a_checkpoint_is_not_larger(way):
    sizes = []
    for make in (lambda p: torch.optim.AdamW(p, 1e-2, fused=True), lambda p: remat.optimizer(p, lr=1e-2, **way)):
        model = net()
        optimizer = make(model.parameters())
        train(model, optimizer, 2)
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        sizes.append(len(saved.getvalue()))
    assert sizes[0] == sizes[1]


@ways
@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["deepcopy", "pickle"])
def test_copies_train_on_by_themselves(how, way):
    model = net()
    optimizer = remat.optimizer(groups(model), lr=1e-2, **way)
    train(model, optimizer, 5)
    other, its = how((model, optimizer))
    assert type(its) is type(optimizer)
    train(other, its, 5, first=5)
    assert its.memory()["disk"] == optimizer.memory()["disk"]
    before = weights(model)
    train(model, optimizer, 5, first=5)
    assert same(weights(model), weights(other)) and not same(before, weights(model))


@ways
def test_hooks_of_the_step_fire_once_around_it(way):
    model = net()
    torch.optim.AdamW(model.parameters())  # a plain one has been there before
    optimizer = remat.optimizer(model.parameters(), lr=1e-2, **way)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, 3)
    assert seen == ["before", "after"] * 3


@pytest.mark.parametrize("way", [AS["disk"], AS["memory"]], ids=["disk", "memory"])
def test_habits_that_need_the_gradients(way):
    def run(make):
        model = net()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for i in range(6):
            optimizer.zero_grad(set_to_none=i % 2 == 0)
            for k in range(2):
                scaler.scale(model(batch(2 * i + k)).square().mean()).backward()
            if i % 3:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

        def closure():
            optimizer.zero_grad()
            loss = model(batch(99)).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(2)]
        return weights(model), losses

    assert same(run(lambda p: remat.optimizer(p, lr=1e-2, **way)), run(lambda p: torch.optim.AdamW(p, 1e-2, fused=True)))


def test_wrapped_models():
    plain = net()
    a = torch.optim.AdamW(groups(plain), 1e-2, fused=True)
    train(plain, a)
    for way in AS.values():
        ours = remat.wrap(net(), activation_budget="100%", time_limit=2)
        b = remat.optimizer(groups(ours), lr=1e-2, **way)
        train(ours, b)
        assert same(weights(ours), weights(plain))
        assert same(b.state_dict(), a.state_dict())


def test_tied_weights_and_hooks_of_parameters():
    def run(make):
        model = net()
        model[5].weight = model[0].weight
        counted = []
        model[3].weight.register_hook(lambda grad: grad * 2)
        model[3].weight.register_post_accumulate_grad_hook(lambda p: counted.append(p.grad.sum().item()))
        train(model, make(model.parameters()), 6)
        return weights(model), counted

    expected = run(lambda p: torch.optim.AdamW(p, 1e-2, fused=True))
    for way in AS.values():
        assert same(run(lambda p: remat.optimizer(p, lr=1e-2, **way)), expected)


# --- the disk ----------------------------------------------------------------------------------------------------------------------


def resident(folder):
    """Bytes of files in `folder` in this process's memory, and mappings of such files."""
    inside, count, mappings = False, 0, 0
    with open("/proc/self/smaps") as table:
        for line in table:
            first = line.split()[0]
            if not first.endswith(":"):
                inside = line.rstrip().endswith("(deleted)") and str(folder) in line
                mappings += inside
            elif inside and first == "Rss:":
                count += int(line.split()[1]) << 10
    return count, mappings


@pytest.mark.parametrize("step", ["after", "overlap"])
def test_few_states_are_in_memory_at_a_time(tmp_path, monkeypatch, step):
    from remat import _optimizer, _torch

    monkeypatch.setattr(_optimizer, "PARCEL", 1 << 20)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(24)))  # 1 MiB each, states 2 MiB
    optimizer = remat.optimizer(model.parameters(), disk=tmp_path, step=step, lr=1e-3)
    seen, done = [], _torch.Traffic.done
    monkeypatch.setattr(_torch.Traffic, "done", lambda traffic, tensors: (seen.append(resident(tmp_path)[0]), done(traffic, tensors)))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 512)).sum().backward()
        optimizer.step()
        assert resident(tmp_path)[0] == 0
    assert optimizer.memory()["disk"] == 48 << 20
    assert optimizer.memory()["to_disk"] == optimizer.memory()["from_disk"] == 48 << 20
    assert 2 << 20 <= max(seen) <= 10 << 20  # computed with, coming, two going


def test_three_hundred_steps_leave_files_mappings_and_threads_as_they_are(tmp_path):
    model = net()
    for step in ("after", "overlap"):
        optimizer = remat.optimizer(model.parameters(), disk=tmp_path, step=step, lr=1e-3)
        counts = []
        for i in (1, 150, 150):
            train(model, optimizer, i)
            counts.append((len(os.listdir("/proc/self/fd")), resident(tmp_path)[1], len(os.listdir("/proc/self/task"))))
        assert counts[0] == counts[1] == counts[2]
        assert counts[0][1] == 1
    del optimizer
    model.zero_grad()
    assert resident(tmp_path)[1] == 0
    assert not list(tmp_path.glob("remat*"))


def test_steps_do_not_load_the_compiler(tmp_path):
    code = """
import io, sys, torch, remat
from test_optimizer import AS, net, train, weights
from compare import same
done = []
for way in AS.values():
    for cls, options in ((torch.optim.AdamW, {"lr": 1e-2}), (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "fused": False})):
        model = net()
        optimizer = remat.optimizer(model.parameters(), cls, **way, **options)
        train(model, optimizer, 3)
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, 1, first=3)
        done.append((cls, options, weights(model)))
assert "torch._dynamo" not in sys.modules
for cls, options, ours in done:
    model = net()
    train(model, cls(model.parameters(), **{"fused": True, **options}), 4)
    assert same(ours, weights(model))
assert "torch._dynamo" in sys.modules  # or this tests nothing
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def test_no_room_is_said_before_weights_change(tmp_path):
    plain, ours = net(), net()
    train(plain, torch.optim.AdamW(plain.parameters(), 1e-2, fused=True))
    optimizer = remat.optimizer(ours.parameters(), disk=tmp_path, lr=1e-2)
    before, limits = weights(ours), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(remat.NoSpace, match=str(tmp_path)) as caught:
            train(ours, optimizer, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.needed == 6 * WIDTH * WIDTH * 4
    assert same(before, weights(ours)) and not optimizer.state
    train(ours, optimizer)
    assert same(weights(ours), weights(plain))


def test_a_full_disk_is_named():
    folder = next((f for f in ("/dev/shm", "/run/shm") if os.path.isdir(f)), None)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = remat.optimizer(model.parameters(), disk=folder, lr=1e-2)
    from remat import _disk

    far = _disk.Layout((1 << 50,), (1,), torch.uint8)
    with pytest.raises(remat.NoSpace, match=folder) as caught:
        optimizer._disk.reserve([far])
    assert caught.value.needed == 1 << 50 and 0 < caught.value.available < 1 << 50


@pytest.mark.parametrize("step", ["after", "overlap"])
def test_a_disk_budget_that_is_too_small(tmp_path, step):
    model = net()
    needed = 6 * WIDTH * WIDTH * 4
    before = weights(model)
    with pytest.raises(remat.NoSpace, match=f"disk_budget={needed - 1}") as caught:
        train(model, remat.optimizer(model.parameters(), disk=tmp_path, disk_budget=needed - 1, step=step), 1)
    assert (caught.value.needed, caught.value.available) == (needed, needed - 1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert same(before, weights(model))
    optimizer = remat.optimizer(model.parameters(), disk=tmp_path, disk_budget=f"{needed} B", step=step)
    train(model, optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # the old files are gone when the new are made
    assert optimizer.memory()["disk"] == needed


def test_options_are_checked_before_anything_else(tmp_path):
    model = net()
    (tmp_path / "a file").touch()
    for wrong, culprit in (({"disk": tmp_path / "none"}, "none"), ({"disk": tmp_path / "a file"}, "a file"), ({"disk": tmp_path, "disk_budget": "much"}, "disk_budget.*much"),
                           ({"disk": f"{tmp_path}/\0cut"}, "disk must be a folder"),
                           ({"disk_budget": "1 GB"}, "disk_budget"), ({"step": "before"}, "before"),
                           ({"disk": tmp_path, "differentiable": True}, "differentiable"), ({"capturable": True}, "capturable")):
        with pytest.raises((ValueError, remat.Error), match=culprit):
            remat.optimizer(model.parameters(), **wrong)
    with pytest.raises(remat.Refused, match="LBFGS"):
        remat.optimizer(model.parameters(), torch.optim.LBFGS)
    for cls in (dict, remat.offloaded(torch.optim.SGD), torch.optim.SGD(model.parameters())):
        with pytest.raises(TypeError, match="cls"):
            remat.offloaded(cls)


def test_classes_that_count_their_steps_are_refused():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.steps = getattr(self, "steps", 0) + 1
            return super().step(closure)

    class Telling(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
            return super().step(closure)

    for cls in (Counting, Telling):
        model = net()
        before = weights(model)
        with pytest.raises(remat.Refused, match="'steps'"):
            train(model, remat.optimizer(model.parameters(), cls, disk=".", lr=1e-2), 1)
        assert same(before, weights(model))


def test_other_file_systems_and_one_that_is_full(small_disk):
    plain, ours = net(), net()
    a, b = torch.optim.AdamW(plain.parameters(), 1e-2, fused=True), remat.optimizer(ours.parameters(), disk=small_disk.folder, lr=1e-2)
    train(plain, a, 3)
    train(ours, b, 2)
    assert b.memory()["disk"] > 0 and small_disk.files() == []
    small_disk.fill()
    train(ours, b, 1, first=2)  # its space has been set aside
    assert same(weights(ours), weights(plain))
    other = net()
    make = lambda: remat.optimizer(other.parameters(), disk=small_disk.folder, lr=1e-2)
    with pytest.raises(remat.NoSpace, match=small_disk.folder) as caught:
        make()
    assert caught.value.needed > caught.value.available >= 0
    with pytest.raises(remat.NoSpace, match=small_disk.folder):
        remat.wrap(net(), offload="activations", disk=small_disk.folder)
    small_disk.free()
    optimizer, before = make(), weights(other)
    small_disk.fill()
    with pytest.raises(remat.NoSpace, match=small_disk.folder):
        train(other, optimizer, 1)
    assert same(before, weights(other))
    small_disk.free()
    train(other, optimizer, 3)
    assert same(weights(other), weights(plain))


def test_many_files_are_told_apart(tmp_path):
    from remat._disk import Disk, Layout, evict

    disk = Disk(tmp_path)
    page = [Layout((1024,), (1,), torch.float32)]
    held = [disk.reserve(page * (1 + k % 3)) for k in range(100)]
    del held[::3]
    held += [disk.reserve(page) for _ in range(20)]
    strangers = [torch.zeros(1024) for _ in range(100)]
    assert all(disk.holds(t) for tensors in held for t in tensors) and not any(map(disk.holds, strangers))
    assert disk.reserved == sum(len(tensors) for tensors in held) * 4096
    for k, t in enumerate(t for tensors in held for t in tensors):
        disk.write(t, torch.full((1024,), float(k)))
    evict([t for tensors in held for t in tensors])
    assert [t[0].item() for tensors in held for t in tensors] == list(range(disk.reserved // 4096))
    held.clear()
    del t
    assert disk.reserved == 0 and not disk.holds(strangers[0])


def test_two_in_one_folder(tmp_path):
    plain, ours = [net(), net()], [net(), net()]
    a = [torch.optim.AdamW(m.parameters(), 1e-2, fused=True) for m in plain]
    b = [remat.optimizer(m.parameters(), disk=tmp_path, lr=1e-2) for m in ours]
    for i in range(4):
        for k in range(2):
            train(plain[k], a[k], 1, first=2 * i + k)
            train(ours[k], b[k], 1, first=2 * i + k)
    assert same([weights(m) for m in ours], [weights(m) for m in plain])
    assert not same(weights(ours[0]), weights(ours[1]))


def test_a_disk_that_fails_to_write(tmp_path, monkeypatch):
    from remat import _torch

    plain, ours = net(), net()
    a, b = torch.optim.AdamW(plain.parameters(), 1e-2, fused=True), remat.optimizer(ours.parameters(), disk=tmp_path, lr=1e-2)
    train(plain, a, 3)
    train(ours, b, 2)
    saved = copy.deepcopy((ours.state_dict(), b.state_dict()))

    def fails(*_):
        raise remat.CopyFailed(f"{tmp_path}: {os.strerror(errno.EIO)}")

    with monkeypatch.context() as broken:
        broken.setattr(_torch.Traffic, "drain", fails)
        with pytest.raises(remat.CopyFailed, match="all parameters have made the step"):
            train(ours, b, 1, first=2)
        assert same(weights(ours), weights(plain))  # a whole step
        with pytest.raises(remat.CopyFailed, match=str(tmp_path)):
            train(ours, b, 1, first=3)
    assert same(weights(ours), weights(plain))
    ours.load_state_dict(saved[0])
    b.load_state_dict(saved[1])
    train(ours, b, 18, first=2)
    train(plain, a, 17, first=3)
    assert same(weights(ours), weights(plain))


def test_a_disk_that_fails_to_read(tmp_path, monkeypatch):
    from remat import _optimizer, _torch

    monkeypatch.setattr(_optimizer, "PARCEL", 1)
    model = net()
    optimizer = remat.optimizer(model.parameters(), disk=tmp_path, lr=1e-2)
    train(model, optimizer, 1)
    before, calls, ready = weights(model), [], _torch.Traffic.ready

    def fails(*of):
        calls.append(of)
        if len(calls) == 2:
            raise remat.CopyFailed(os.strerror(errno.EIO))
        ready(*of)

    monkeypatch.setattr(_torch.Traffic, "ready", fails)
    with pytest.raises(remat.CopyFailed, match="of 8 parameters have made the step"):
        train(model, optimizer, 1, first=1)
    changed = [not torch.equal(a, b) for a, b in zip(before, weights(model))]
    assert changed == sorted(changed, reverse=True) and changed[0] and not changed[-1]


def test_a_forked_process_is_refused(tmp_path):
    model = net()
    optimizer = remat.optimizer(model.parameters(), disk=tmp_path, lr=1e-2)
    train(model, optimizer, 1)
    model(batch(1)).square().mean().backward()
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
            os._exit(1)
        except remat.Refused:
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    optimizer.step()


RESTARTED = """
import os, sys, torch
sys.path[:0] = sys.argv[1:3]
import test_optimizer as t, remat
from remat import _optimizer
torch.set_num_threads(1)
model = t.net()
optimizer = remat.optimizer(model.parameters(), disk="files", lr=1e-2)
if os.path.exists("saved"):
    saved = torch.load("saved")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    t.train(model, optimizer, 10, first=10)
    torch.save(model.state_dict(), "result")
else:
    t.train(model, optimizer, 10)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "saved")
    t.train(model, optimizer, 3, first=10)
    _optimizer.PARCEL, original, calls = 1, optimizer._apply, []
    def apply(*of):
        original(*of)
        calls.append(of)
        if len(calls) == 3:
            os.kill(os.getpid(), 9)
    optimizer._apply = apply
    t.train(model, optimizer, 1, first=13)
"""


def test_killed_in_a_step_and_restarted_from_a_checkpoint(tmp_path):
    (tmp_path / "files").mkdir()
    here = os.path.dirname(__file__)
    run = [sys.executable, "-c", RESTARTED, here, os.path.dirname(here)]
    assert subprocess.run(run, cwd=tmp_path).returncode == -signal.SIGKILL
    assert not list((tmp_path / "files").iterdir())
    assert subprocess.run(run, cwd=tmp_path).returncode == 0
    plain = net()
    train(plain, torch.optim.AdamW(plain.parameters(), 1e-2, fused=True))
    assert same(dict(torch.load(tmp_path / "result")), dict(plain.state_dict()))
