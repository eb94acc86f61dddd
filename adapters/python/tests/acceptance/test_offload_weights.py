# SPDX-License-Identifier: Apache-2.0
"""Weights in files on a disk."""

import copy
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
import torch

import remat
from offloaded import WIDE, Net, in_files, inputs, net, trained


class Tied(torch.nn.Module):
    """A model with tied weights, weights that are views of one tensor, and a large buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)
        self.last.weight = self.first.weight
        both = torch.randn(2, 128, 64)
        self.left, self.right = torch.nn.Parameter(both[0]), torch.nn.Parameter(both[1])
        self.norm = torch.nn.BatchNorm1d(2048)
        self.small = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.last(torch.nn.functional.gelu(self.first(x))) * self.small
        return self.norm((x @ self.left - x @ self.right).T.reshape(-1, 2048)).square().mean()


def fitted(model, optimizer, steps=6, first=0):
    for i in range(first, first + steps):
        optimizer.zero_grad()
        model(torch.randn(64, 128, generator=torch.Generator().manual_seed(i))).backward()
        optimizer.step()
    return model.state_dict()


def tied():
    torch.manual_seed(6)
    return Tied()


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_weights_in_files(tmp_path, optimizer_first):
    expected = fitted(plain := tied(), torch.optim.AdamW(plain.parameters(), 1e-2, fused=True), 12)
    model = tied()
    objects = dict(model.named_parameters())
    made = lambda **told: remat.optimizer(model.parameters(), lr=1e-2, **told)
    optimizer = made(disk=tmp_path) if optimizer_first else None
    remat.wrap(model, offload="all", disk=tmp_path, disk_budget="10 MB", cache=False)
    optimizer = optimizer or made(model=model)
    files = ["first.weight", "left", "right", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "last.weight"]
    assert sorted(in_files(model, tmp_path)) == sorted(files)
    assert optimizer.memory()["disk"] == 0
    fitted(model, optimizer, 6)
    assert remat.of(model).memory()["weights"] == (2 * 128 * 128 + 4 * 2048) * 4
    assert optimizer.memory()["disk"] > 0
    assert remat.unwrap(model) is model
    assert not in_files(model, tmp_path)
    found = fitted(model, optimizer, 6, first=6)
    assert list(found) == list(expected) and all(torch.equal(found[k], expected[k]) for k in expected)
    assert dict(model.named_parameters()) == objects and model.first.weight is model.last.weight
    assert model.left.untyped_storage().data_ptr() == model.right.untyped_storage().data_ptr()


def test_weights_in_files_are_shared(tmp_path):
    """`share_memory` moves parameters and gradients out of their files."""
    plain, model = tied(), remat.wrap(tied(), offload="all", disk=tmp_path, cache=False)
    memory = remat.of(model).memory()
    assert memory["weights"] > 0 and memory["gradients"] > 0 and memory["planned"] == 0  # no step has been planned so far
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in (plain, model)]
    for first in (0, 2):
        states = [fitted(m, optimizer, 2, first) for m, optimizer in zip((plain, model), optimizers)]
        assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states)))
        assert model.share_memory() is model


WITHOUT_THREADS = """
import os, resource, sys, threading, torch, remat
from test_offload_weights import fitted, tied
torch.set_num_threads(1)
folder, plain, models = sys.argv[1], tied(), [tied(), tied()]
optimizers = [remat.optimizer(m.parameters(), disk=folder, step=step, lr=1e-2) for m, step in zip(models, ("after", "overlap"))]
expected = fitted(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
for m, offload in zip(models, ("all", "activations")):
    remat.wrap(m, activation_budget="90%", offload=offload, disk=folder, cache=False, time_limit=1)
if os.getuid() == 0:
    os.setresuid(54321, 54321, 54321)  # no limit holds for root
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    threading.Thread(target=int).start()
except RuntimeError:
    for m, optimizer in zip(models, optimizers):
        for first in range(0, 6, 2):
            found = fitted(m, optimizer, 2, first)
        assert all(torch.equal(a, b) for a, b in zip(expected.values(), found.values()))
    print("equal")
else:
    print("threads")
"""


def test_without_threads_callers_copy(tmp_path):
    """If the process cannot start threads, the calling thread copies."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    with tempfile.TemporaryDirectory() as folder:  # a folder that other users can access
        os.chmod(folder, 0o777)
        done = subprocess.run([sys.executable, "-c", WITHOUT_THREADS, folder], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    if done.stdout == "threads\n":
        pytest.skip("this user may have threads without end")
    assert done.stdout == "equal\n"


def test_backwards_on_two_threads_add_up(tmp_path):
    """A gradient moves to its file while the backward of another thread adds to it."""
    model = remat.wrap(torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(4096)) for _ in range(6)), offload="all", disk=tmp_path)

    def work():
        for _ in range(50):
            sum(p.sum() for p in model).backward()

    for _ in range(5):
        model.zero_grad()
        threads = [threading.Thread(target=work) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert all(torch.equal(p.grad, torch.full_like(p, 100)) for p in model)


def test_weights_in_files_are_saved_copied_and_moved_again(tmp_path):
    model = remat.wrap(tied(), offload="all", disk=tmp_path, cache=False)
    other = copy.deepcopy(model)
    assert in_files(model, tmp_path) and not in_files(other, tmp_path)
    fitted(other, torch.optim.SGD(other.parameters(), 1e-2), 2)
    assert len(in_files(other, tmp_path)) == len(in_files(model, tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tied().parameters()))
    assert not torch.equal(other.left, model.left)
    sizes = []
    for each in (model, tied()):
        torch.save(each.state_dict(), tmp_path / "saved")
        sizes.append((tmp_path / "saved").stat().st_size)
    assert sizes[0] == sizes[1]
    remat.wrap(model, offload="optimizer", disk=tmp_path, cache=False)
    fitted(model, remat.optimizer(model.parameters(), model=model), 1)
    assert not in_files(model, tmp_path)


class Adapted(torch.nn.Module):
    """A model with large weights, frozen or not, and small trainable weights, as with LoRA."""

    def __init__(self, frozen):
        super().__init__()
        self.base = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(12)).requires_grad_(not frozen)
        self.down = torch.nn.ModuleList(torch.nn.Linear(256, 4, bias=False) for _ in range(12))
        self.up = torch.nn.ModuleList(torch.nn.Linear(4, 256, bias=False) for _ in range(12))

    def forward(self, x):
        for base, down, up in zip(self.base, self.down, self.up):
            x = torch.nn.functional.gelu(base(x)) + up(down(x)) + x
        return x.square().mean()


def adapted(frozen, steps=9, told=None, budgets=("",)):
    """Trains with a list of budgets, each for an equal share of the steps. Returns (losses, model, memory figures per budget)."""
    torch.manual_seed(8)
    model = Adapted(frozen)
    if told:
        remat.wrap(model, budget=budgets[0], cache=False, time_limit=2, **told)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-4)
    losses, memory = [], []
    for i in range(steps):
        optimizer.zero_grad()
        if told and i % 3 == 0:
            remat.of(model).set_budget(budgets[i // 3])
        loss = model(torch.randn(64, 256, generator=torch.Generator().manual_seed(i)))
        if told and i % 3 == 2:
            remat.of(model).reset_peak()
        loss.backward()
        if told and i % 3 == 2:
            memory.append(remat.of(model).memory())
        optimizer.step()
        losses.append(loss.item())
    return losses, model, memory


@pytest.mark.parametrize("frozen", [True, False])
def test_weights_by_the_plan(tmp_path, frozen):
    losses, plain, _ = adapted(frozen)
    weights = 12 * 256 * 256 * 4
    budgets = ("20 MB", str(weights // 2), str(weights // 2 + weights // 4))
    found, model, memory = adapted(frozen, told={"offload": "all", "weights": "planned", "disk": tmp_path}, budgets=budgets)
    assert found == losses
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters()))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters()) if a.requires_grad)
    assert memory[0]["fetched"] == 0 and memory[0]["planned"] >= weights  # all weights fit in memory, and count
    for told in memory[1:]:
        assert told["fetched"] >= weights
        assert told["planned"] <= told["budget"] < weights
        assert told["peak"] <= told["budget"]
    assert in_files(model, tmp_path) and not in_files(remat.unwrap(model), tmp_path)


def test_weights_that_do_not_fit_stay_where_they_are(tmp_path):
    model = tied()
    with pytest.raises(remat.NoSpace, match="disk_budget=1000"):
        remat.wrap(model, offload="all", disk=tmp_path, disk_budget=1000)
    assert not in_files(model, tmp_path) and not remat.is_wrapped(model)


def test_an_optimizer_takes_the_disk_of_its_model(tmp_path):
    model = tied()
    with pytest.raises(remat.Error, match="not wrapped"):
        remat.optimizer(model.parameters(), model=model)
    remat.wrap(model, cache=False)
    with pytest.raises(ValueError, match="offload"):
        remat.optimizer(model.parameters(), model=model)
    remat.wrap(model, offload="optimizer", disk=tmp_path, disk_budget=4096, cache=False)
    with pytest.raises(ValueError, match="disk"):
        remat.optimizer(model.parameters(), model=model, disk=tmp_path)
    with pytest.raises(remat.NoSpace, match="disk_budget=4096"):
        fitted(model, remat.optimizer(model.parameters(), model=model), 1)
    assert remat.of(model).memory()["disk"] == 0


def test_two_models_in_one_folder_take_turns(tmp_path):
    def turns(**options):
        models = [net(WIDE, **options), net(WIDE, **options)]
        optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in models]
        torch.manual_seed(4)
        losses = []
        for _ in range(3):
            x = inputs(models[0])
            forwards = [m(x) for m in models]  # two steps in flight
            for loss, optimizer in zip(forwards, optimizers):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses += [f.item() for f in forwards]
        return losses, models

    plain, _ = turns()
    ours, models = turns(activation_budget="60%", offload="activations", disk=tmp_path, disk_budget="20 MB")
    assert ours == plain
    assert all(remat.of(m).memory()["to_disk"] > 0 for m in models)


def test_workers_of_a_loader_between_steps(tmp_path):
    """Worker processes of a loader are forked while files are open and threads copy."""

    def run(**options):
        model = net(**options)
        data = torch.utils.data.TensorDataset(torch.randn(8192, 128, generator=torch.Generator().manual_seed(5)))
        losses = []
        for _ in range(2):
            for (x,) in torch.utils.data.DataLoader(data, batch_size=2048, num_workers=2):
                loss = model(x)
                loss.backward()
                losses.append(loss.item())
        return losses

    assert run(activation_budget="60%", offload="activations", disk=tmp_path) == run()
    assert not list(tmp_path.iterdir())


def test_a_thousand_steps_do_not_grow(tmp_path):
    model = Net(32)
    x = torch.randn(512, 32)
    searched = remat.Planner(activation_budget="60%", time_limit=3, first_limit=3)  # a full search before the first step, so no search runs beside the steps
    remat.wrap(model, (x,), cache=False, planner=searched, offload="activations", disk=tmp_path)

    def held():
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(list(maps)), remat.of(model).memory()["live"]

    counts = []
    for k in range(1000):
        model.zero_grad()
        model(x).backward()
        if k in (20, 999):
            counts.append(held())
    before, after = counts
    assert after[:2] == before[:2] and after[3] == before[3]
    assert after[2] <= before[2] + 20  # mappings of the allocator


TRAINING = """
import os, sys, torch, remat
from offloaded import WIDE, Net, inputs
folder, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(1)
model = Net(WIDE)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
last = os.path.join(folder, "checkpoint")
first = 0
if os.path.exists(last):
    saved = torch.load(last)
    first = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
remat.wrap(model, cache=False, time_limit=3, activation_budget="60%", offload="activations", disk=os.path.join(folder, "disk"))
for k in range(first, steps):
    torch.manual_seed(k)
    optimizer.zero_grad()
    loss = model(inputs(model))
    loss.backward()
    optimizer.step()
    torch.save({"step": k + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, last + ".new")
    os.replace(last + ".new", last)
    assert remat.of(model).memory()["to_disk"] > 0
    print(k, loss.item(), flush=True)
"""


def test_a_disk_that_fills_up(small_disk):
    losses, _ = trained(net(WIDE))
    small_disk.fill()
    with pytest.raises(remat.Error, match=small_disk.folder):
        trained(net(WIDE, activation_budget="60%", offload="activations", disk=small_disk.folder))
    small_disk.free()
    model = net(WIDE, activation_budget="60%", offload="activations", disk=small_disk.folder)
    assert trained(model)[0] == losses
    assert remat.of(model).memory()["to_disk"] > 0 and small_disk.files() == []


def test_killed_in_a_step_it_leaves_nothing_and_resumes(tmp_path):
    def start(folder, steps):
        (folder / "disk").mkdir(parents=True, exist_ok=True)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
        return subprocess.Popen([sys.executable, "-c", TRAINING, str(folder), str(steps)], stdout=subprocess.PIPE, text=True, env=env)

    (tmp_path / "disk").mkdir()
    for name in ("whole", "beside"):  # two processes use one folder
        (tmp_path / name).mkdir()
        (tmp_path / name / "disk").symlink_to(tmp_path / "disk")
    whole, beside = (process.communicate()[0].splitlines() for process in [start(tmp_path / name, 8) for name in ("whole", "beside")])
    assert len(whole) == 8 and beside == whole
    assert not list((tmp_path / "disk").iterdir())
    killed = start(tmp_path / "killed", 1000)
    for k in range(3):
        assert killed.stdout.readline() == whole[k] + "\n"
    time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not list((tmp_path / "killed" / "disk").iterdir())
    rest = start(tmp_path / "killed", 8).communicate()[0].splitlines()
    assert 0 < len(rest) <= 5 and rest == whole[-len(rest):]
