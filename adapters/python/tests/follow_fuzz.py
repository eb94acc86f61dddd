# SPDX-License-Identifier: Apache-2.0
"""Random modules in random loops: each step equals eager mode bit by bit. The seed and the step determine the operators of a module.

    follow_fuzz.py [FROM TO]    range of seeds; default: 60 seeds, or 2000 with REMAT_FULL=1
"""

import os
import random
import sys
import traceback
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat

ROWS, WIDTH, STEPS = 6, 8, 6


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient * ctx.factor + 0.01 * x, None


class Module(nn.Module):
    """A fixed list of operators, some of which depend on the step."""

    def __init__(self, seed):
        super().__init__()
        self.choose = random.Random(seed)
        self.seed, self.step = seed, 0
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.drop, self.cell = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.GRUCell(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.state, self.notes, self.given = torch.zeros(ROWS, WIDTH), [], None
        self.acts = [self.choose.choice(ACTS) for _ in range(self.choose.randint(3, 10))]
        self.varying = self.choose.random() < 0.3
        self.outputs = [(self.choose.random(), self.choose.choice(("it", "view", "detached", "twice"))) for _ in range(self.choose.randint(1, 3))]
        self.returns_input = self.choose.random() < 0.2

    def forward(self, x, y):
        self.step += 1
        r = random.Random(self.seed * 1000 + (self.step if self.varying and self.step % 2 else 0))
        self.given, pool = (x, y), [x, y, self.layers[0](x)]
        for act in self.acts:
            pool.append(act(self, pool[-1], r.choice(pool), r))
        self.given, found = None, []
        for place, kind in self.outputs:
            t = pool[-1] if not found else pool[int(place * len(pool))]
            found.append({"it": t, "view": t[1:4], "detached": t.detach(), "twice": t}[kind])
            if kind == "twice":
                found.append(t)
        if not any(t.requires_grad for t in found):
            found.append(self.layers[3](pool[-1]))
        if self.returns_input:
            found.append(y)
        return found


def write(m, a, b, r):
    c = a * 1.5
    c[:, 1:4] *= 2
    c[r.randrange(ROWS)] = b[0]
    return c


def overwrite(m, a, b, r):
    """Overwrites an input of the module, which changes its history in autograd."""
    given = r.choice(m.given)
    if given.grad_fn is not None or not given.requires_grad:
        given.mul_(a.detach().sigmoid())
    return a + given


def average(m, a, b, r):
    with torch.no_grad():
        m.mean.lerp_(a.detach().mean(0), 0.1)
    return a - m.mean


def keep(m, a, b, r):
    m.state = (0.5 * m.state + a).detach()
    return a + 0.1 * m.state


def look(m, a, b, r):
    return a.sin() if float(a.detach().sum()) > 0 else a * 0.5


def note(m, a, b, r):
    m.notes.append(float(a.detach().abs().max()))
    return a / (1 + m.notes[-1])


def inner(m, a, b, r):
    with torch.enable_grad():
        z = a.detach().requires_grad_()
        g, = torch.autograd.grad((z.tanh() * m.scale.detach()).sum(), z)
    return a + g


def grow(m, a, b, r):
    n = 2 + m.step % 3
    return a + F.pad(b[:n].cumsum(0), (0, 0, 0, ROWS - n))


def hooked(m, a, b, r):
    a = a * 1.25
    if a.requires_grad:
        a.register_hook(lambda g: 0.5 * g)
    return a


ACTS = [
    lambda m, a, b, r: a.tanh(),
    lambda m, a, b, r: F.relu(a, inplace=False),
    lambda m, a, b, r: a * b,
    lambda m, a, b, r: a + 0.3 * b,
    lambda m, a, b, r: m.layers[r.randrange(3)](a),
    lambda m, a, b, r: m.drop(a),
    lambda m, a, b, r: m.norm(a),
    lambda m, a, b, r: m.cell(a, b),
    lambda m, a, b, r: a * torch.rand_like(a),
    lambda m, a, b, r: torch.cat([a[:, :3], b[:, 3:]], 1),
    lambda m, a, b, r: a.t().contiguous().t().reshape(ROWS, WIDTH),
    lambda m, a, b, r: a.softmax(-1) * m.scale,
    lambda m, a, b, r: F.layer_norm(a, (WIDTH,)),
    lambda m, a, b, r: torch.where(a > b, a, 0.1 * b),
    lambda m, a, b, r: a - a.max(),
    lambda m, a, b, r: a * torch.cumprod(1 + 0.1 * b.sigmoid(), -1),
    lambda m, a, b, r: a.masked_fill(b > 0.5, 0.25),
    lambda m, a, b, r: a + a[b > 0].sum(),
    lambda m, a, b, r: Scaled.apply(a, 1.5 if m.varying else 0.5 + m.step % 2),
    lambda m, a, b, r: checkpoint(lambda h: m.drop(m.layers[1](h)).relu(), a, use_reentrant=False),
    lambda m, a, b, r: F.dropout(a, 0.1 + 0.1 * (m.step % 3)),
    lambda m, a, b, r: a ** (2 if m.step % 2 else 3),
    lambda m, a, b, r: a if m.varying and r.random() < 0.5 else m.layers[2](a),
    lambda m, a, b, r: a.double().sin().float(),
    lambda m, a, b, r: a + b.detach() * m.scale,
    write, overwrite, average, keep, look, note, inner, grow, hooked,
]


def loop(model, seed):
    """Trains a model and returns its results."""
    r = random.Random(seed + 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    habit = r.choice(("plain", "plain", "plain", "accumulate", "retain", "penalty", "both", "graph"))
    zero, decay, all_outputs = r.random() < 0.5, r.random() < 0.3, r.random() < 0.6
    seen = []
    for k in range(STEPS):
        torch.manual_seed(seed * 100 + k)
        optimizer.zero_grad(set_to_none=zero)
        losses, inputs = [], []
        for _ in range(2 if habit in ("accumulate", "both") else 1):
            x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=r.random() < 0.5)
            if k == 3 and r.random() < 0.2:
                with torch.no_grad():
                    seen += [t.clone() for t in model(x, y)]
            of_weights = y.requires_grad and r.random() < 0.4
            outputs = model(x, y * 1.5 if of_weights else y)
            used = [t for i, t in enumerate(outputs) if t.requires_grad and (i == 0 or all_outputs or r.random() < 0.5)]
            loss = sum((t.square().mean() for t in used or [t for t in outputs if t.requires_grad]), torch.zeros(()))
            if decay:
                loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
            if habit == "graph" and y.requires_grad:
                g, = torch.autograd.grad(loss, y, create_graph=True, allow_unused=True)
                loss = loss + (0 if g is None else g.square().sum())
            if habit == "accumulate":
                loss.backward()
            elif habit == "retain":
                loss.backward(retain_graph=True)
                loss.backward()
            losses.append(loss)
            inputs.append(y)
            seen += [t.detach().clone() for t in outputs]
        if habit not in ("accumulate", "retain"):
            sum(losses).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        seen += [None if t is None else t.clone() for t in [*(p.grad for p in model.parameters()), *(y.grad for y in inputs), *model.buffers()]]
        seen += [torch.get_rng_state(), model.state.clone()]
        optimizer.step()
    return seen, list(model.notes)


def same(a, b):
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def fails(seed):
    """Compares plain with planned training. @return the first difference; empty if there is none"""
    torch.manual_seed(seed)
    plain = Module(seed)
    torch.manual_seed(seed)
    planned = Module(seed)
    try:
        expected = loop(plain, seed)
    except RuntimeError as e:  # the loop itself is wrong: a written view, or a freed graph
        expected = e
    choose = random.Random(seed + 2)
    sample = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) if choose.random() < 0.2 else ()
    try:
        remat.wrap(planned, sample, budget=choose.choice((None, "100% of activations")), cache=False, planner=remat.Planner(time_limit=0.2))
        found = loop(planned, seed)
    except Exception as e:
        if isinstance(expected, RuntimeError) and isinstance(e, RuntimeError):
            return ""
        return traceback.format_exc()
    if isinstance(expected, RuntimeError):
        return f"eager mode raises: {expected}"
    for i, (a, b) in enumerate(zip(expected[0], found[0])):
        if not same(a, b):
            return f"tensor {i} of {len(expected[0])} is another one"
    return "" if len(expected[0]) == len(found[0]) and expected[1] == found[1] else "the module has kept something else"


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seeds = range(*map(int, sys.argv[1:3])) if len(sys.argv) > 2 else range(2000 if os.environ.get("REMAT_FULL") else 60)
    wrong = [(seed, why) for seed in seeds if (why := fails(seed))]
    for seed, why in wrong:
        print(f"seed {seed}: {why}")
    print(f"{len(seeds)} modules, {len(wrong)} of them wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
