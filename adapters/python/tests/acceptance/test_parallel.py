# SPDX-License-Identifier: Apache-2.0
"""Training with several processes or devices."""

import contextlib
import itertools
import os
import socket
import zlib

import pytest
import torch
import torch.distributed as dist
from differential import content
from test_module import Net, wrapped
from torch import nn

import remat

MODES = {
    "default": {},
    "static graph": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
}


class Plain(nn.Module):
    """A model without frozen parts, with a layer that not every step uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, skip=False):
        x = self.norm(self.a(x)).sin().exp().tanh().sin().cos()
        return (self.b(x) if skip else self.c(self.b(x).tanh().exp())).sin().tanh().sum(1)


def steps(model, rank, mode, hook):
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(None, fp16_compress_hook)
    torch.manual_seed(rank)
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(6):
        x = torch.randn(50, 6)
        skip = mode == "find unused" and i % 2 == 1
        if mode == "default" and i == 3:
            with model.no_sync():
                model(x, skip=skip).sum().backward()
        y = model(x, skip=skip)
        y.sum().backward()
        seen += [content(y)] + [content(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [content(t) for t in model.state_dict().values()]


def told_by(target, *args):
    """The result of `target`, or the message of its error."""
    try:
        return target(*args)
    except remat.Refused as e:
        return str(e)
    except Exception as e:  # passed on to the test
        return f"{type(e).__name__}: {e}"


def in_group(rank, environment, processes, target, cases, queue):
    """Body of a process of the group: runs `target` on each case and puts the results into the queue."""
    torch.set_num_threads(1)
    os.environ.update(environment)  # that of the test, and not of the server that forked this process
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    try:
        queue.put((rank, [told_by(target, rank, *case) for case in cases]))
    finally:
        dist.destroy_process_group()


def together(target, *cases, processes=2):
    """Runs `target` on all cases in one group of processes. Returns the results of all processes per case.

    The processes are forked by a server that has imported PyTorch, because the import takes seconds.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "remat", "torch.distributed.fsdp", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"])
    queue = context.SimpleQueue()
    torch.multiprocessing.start_processes(in_group, (environment, processes, target, cases, queue), nprocs=processes, start_method="forkserver")
    return list(zip(*(told for _, told in sorted((queue.get() for _ in range(processes)), key=lambda x: x[0])), strict=True))


def work(rank, mode, hook):
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Plain()
        if planned:
            remat.wrap(model, budget="70%", time_limit=1, gap=0.9)
        results.append(steps(nn.parallel.DistributedDataParallel(model, **MODES[mode]), rank, mode, hook))
    return results[0] == results[1], remat.of(model).plan["recomputed"]


def test_distributed_data_parallel():
    """Gradients of a wrapped model in DDP equal those of a plain model in DDP."""
    cases = [(mode, False) for mode in MODES] + [("default", True)]
    for case, both in zip(cases, together(work, *cases), strict=True):
        for told in both:
            assert isinstance(told, tuple), (case, told)
            same, recomputed = told
            assert same is True and recomputed > 0, (case, told)


def test_gradients_come_in_the_order_of_eager_mode():
    """DDP builds buckets from the order of gradients in the first step, and sums over four processes depend on the buckets."""
    (told,) = together(work, ("default", False), processes=4)
    assert all(same is True for same, _ in told), told


def shard(rank, first, parts):
    """Compares plain with wrapped training. first: True to wrap before sharding. parts: True to shard each inner module, too."""
    from torch.distributed.fsdp import fully_shard

    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Plain()
        if planned and first:
            remat.wrap(model, budget="70%", time_limit=1, gap=0.9)
        for part in model.children() if parts else ():
            fully_shard(part)
        fully_shard(model)
        if planned and not first:
            remat.wrap(model, budget="70%", time_limit=1, gap=0.9)
        seen = []
        for i in range(3):
            x = torch.randn(50, 6, generator=torch.Generator().manual_seed(10 * rank + i))
            y = model(x)
            y.sum().backward()
            seen += [content(y)] + [content(p.grad.to_local()) for p in model.parameters()]
            model.zero_grad()
        results.append(seen)
    return results[0] == results[1]


def shard_strict(rank):
    from torch.distributed.fsdp import fully_shard

    model = Plain()
    fully_shard(model)
    remat.wrap(model, on_refuse="raise")(torch.randn(50, 6))


def test_fully_shard():
    """Gradients of a wrapped model in FSDP equal plain FSDP. With on_refuse="raise" an error names FSDPModule."""
    for both in together(shard, *itertools.product((True, False), (True, False))):
        assert all(same is True for same in both), both
    for both in together(shard_strict, ()):
        assert all("FSDPModule" in told for told in both), both


def test_data_parallel_is_refused():
    """`wrap` refuses a DataParallel or DistributedDataParallel module, and DataParallel gets an error for a wrapped model."""
    with pytest.raises(remat.Refused, match="torchrun"):
        remat.wrap(nn.DataParallel(Net()))
    with contextlib.ExitStack() as stack:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        stack.callback(dist.destroy_process_group)
        with pytest.raises(remat.Refused, match="wrap the module inside"):
            remat.wrap(nn.parallel.DistributedDataParallel(Net()))
    model = wrapped()
    with pytest.raises(remat.Refused, match="torchrun"):
        model._replicate_for_data_parallel()


def on_disk(rank, folder):
    """Weights, gradients and states on a disk, with gradients averaged over processes."""
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        if planned:
            remat.wrap(model, offload="all", disk=folder, cache=False)
            optimizer = remat.optimizer(model.parameters(), lr=0.1, model=model)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
        data_parallel = nn.parallel.DistributedDataParallel(model)
        torch.manual_seed(rank)
        seen = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = data_parallel(torch.randn(16, 64)).square().mean()
            loss.backward()
            seen += [loss.item(), *(content(p.grad) for p in model.parameters())]
            optimizer.step()
        results.append(seen + [content(p) for p in model.parameters()])
    return results[0] == results[1], [zlib.crc32(repr(c).encode()) for c in results[1][-4:]], results[1][0]


def test_states_weights_and_gradients_of_each_process_on_one_disk(tmp_path):
    (first, second), = together(on_disk, (str(tmp_path),))
    assert first[0] is True and second[0] is True, (first, second)
    assert first[1] == second[1] and first[2] != second[2]
    assert not list(tmp_path.iterdir())
