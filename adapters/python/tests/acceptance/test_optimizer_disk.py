# SPDX-License-Identifier: Apache-2.0
"""States of optimizers on a disk: memory, files, full disks, failing disks, restarts."""

import copy
import errno
import os
import pickle
import resource
import signal
import subprocess
import sys

import pytest
import torch
from compare import same

import remat
from optimizing import WIDTH, batch, net, train, weights


def resident(folder):
    """(resident bytes of files in `folder`, number of their mappings) in this process."""
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
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(24)))  # 1 MiB per weight, 2 MiB of states
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
    assert 2 << 20 <= max(seen) <= 10 << 20  # states in use, states being fetched, and two parcels being evicted


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
from test_optimizer import AS
from optimizing import net, train, weights
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
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # the old files are deleted before the new files are made
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
    train(ours, b, 1, first=2)  # the space was reserved before
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
    from remat import _torch
    from remat._disk import Disk, Layout

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
    _torch.evict([t for tensors in held for t in tensors])
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
        assert same(weights(ours), weights(plain))  # the step is complete in spite of the failure
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
import optimizing as t, remat
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
