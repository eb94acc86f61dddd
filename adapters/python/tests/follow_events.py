# SPDX-License-Identifier: Apache-2.0
"""Random models, and random events between their steps: everything is that of eager mode, bit by bit, exceptions included.

    follow_events.py [FROM TO]    these seeds; default: 24 of them, or 1000 with REMAT_FULL=1
"""

import copy
import os
import random
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import remat
from compare import same

WIDTH = 8


class Raised(Exception):
    pass


class Block(nn.Module):
    """One of the kinds of `BLOCKS`."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls, self.state = kind, 0, None
        self.first, self.last, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.norm, self.words, self.cell = nn.BatchNorm1d(WIDTH, affine=False), nn.Embedding(7, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, h, tokens):
        self.calls += 1
        return BLOCKS[self.kind](self, h, tokens)


def keep(b, h, tokens):
    before, b.state = b.state, h.detach().mean((0, 1))
    b.mean.lerp_(b.state, 0.1)
    return b.first(h) - b.mean if before is None else b.first(h) + 0.1 * before


def teach(b, h, tokens):
    with torch.inference_mode():
        target = b.last(h).double().to(h.dtype)
    return b.first(h).tanh() + target


BLOCKS = {
    "linear": lambda b, h, tokens: F.gelu(b.first(h)),
    "residual": lambda b, h, tokens: h + b.last(b.drop(b.first(h)).relu()),
    "norm": lambda b, h, tokens: b.norm(b.first(h).transpose(1, 2)).transpose(1, 2),
    "attention": lambda b, h, tokens: h + b.attention(h, h, h, need_weights=False)[0],
    "words": lambda b, h, tokens: (h + b.words(tokens)) @ b.words.weight.T @ b.words.weight,
    "recurrent": lambda b, h, tokens: b.cell(h)[0],
    "branch": lambda b, h, tokens: b.first(h) if h.detach().sum() > 0 else b.last(h),
    "value": lambda b, h, tokens: b.first(h / (1 + h.detach().abs().max().item())),
    "count": lambda b, h, tokens: b.first(h) * (0.1 * b.calls),
    "mask": lambda b, h, tokens: h + torch.zeros_like(h).masked_scatter(tokens.unsqueeze(2) > 3, b.first(h[tokens > 3])),
    "skip": lambda b, h, tokens: h if torch.rand(()) < 0.4 else b.first(h),
    "keep": keep, "teach": teach,
}


class Model(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.blocks = nn.ModuleList(Block(choose.choice(list(BLOCKS))) for _ in range(choose.randint(1, 3)))
        self.head, self.form, self.raises_at = nn.Linear(WIDTH, WIDTH), choose.choice(FORMS), None

    def forward(self, x, tokens):
        h = hidden = x
        for i, block in enumerate(self.blocks):
            if i == self.raises_at:
                raise Raised
            h = hidden = block(h, tokens)
        return self.form(self.head(h), hidden)


FORMS = [lambda y, h: (y,), lambda y, h: (y, h), lambda y, h: (y, h.mean((0, 1))), lambda y, h: (y[:, 1:], h.transpose(0, 1)), lambda y, h: (y, y, h)]


class Loop:
    """A model in training. `seen` is what is compared."""

    def __init__(self, seed, wrapped):
        choose = random.Random(seed)
        torch.manual_seed(seed)
        self.model, self.seen, self.kept = Model(choose), [], []
        if wrapped:
            remat.wrap(self.model, budget=choose.choice((None, "100% of activations")), cache=False, planner=remat.Planner(time_limit=0.2))
        self.optimize()

    def optimize(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)

    def look(self, *tensors):
        self.seen += [None if t is None else t.detach().clone() for t in tensors]

    def data(self, rows=4, length=4):
        return torch.randn(rows, length, WIDTH), torch.randint(7, (rows, length))

    def forward(self, r, data=None):
        outputs = self.model(*(data or self.data()))
        self.look(*outputs)
        used = outputs if r.random() < 0.5 else outputs[:1]
        return sum(t.float().square().mean() for t in used)

    def step(self, r):
        self.optimizer.zero_grad(r.random() < 0.7)
        self.forward(r).backward()
        self.optimizer.step()

    def trained(self):
        return [p for p in self.model.parameters() if p.requires_grad]


def evaluate(loop, r):
    loop.model.eval()
    with r.choice((torch.no_grad, torch.inference_mode))():
        loop.look(*loop.model(*loop.data()))
    loop.model.train(r.random() < 0.8)


def accumulate(loop, r):
    loop.optimizer.zero_grad()
    for rows in r.choice(((2, 4, 3), (4, 4), (1, 2))):
        loop.forward(r, loop.data(rows, r.randint(2, 5))).backward()
    loop.optimizer.step()


def freeze(loop, r):
    loss, between = loop.forward(r), r.random() < 0.5
    for p in loop.model.parameters():
        p.requires_grad_(r.random() < 0.7)
    (loss if between else loop.forward(r)).backward()
    loop.optimizer.step()
    if between:
        loop.model.requires_grad_()


def load(loop, r):
    state = {k: 0.9 * v if v.is_floating_point() else v.clone() for k, v in loop.model.state_dict().items()}
    loop.model.load_state_dict(state, assign=r.random() < 0.5)
    loop.optimize()


def autocast(loop, r):
    loop.optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loop.forward(r)
    loss.backward()
    loop.optimizer.step()


def later(loop, r):
    loop.kept.append(loop.forward(r))
    if r.random() < 0.6:
        loop.kept.pop(r.randrange(len(loop.kept))).backward()


def some(loop, r):
    loss, ps = loop.forward(r), loop.trained()
    loop.look(*torch.autograd.grad(loss, ps[:r.randint(1, len(ps))], allow_unused=True, retain_graph=True))
    loss.backward()


def fail(loop, r):
    loop.model.raises_at = r.randrange(len(loop.model.blocks))
    try:
        loop.step(r)
    finally:
        loop.model.raises_at = None


def hook(loop, r):
    def raises(_):
        raise Raised

    handle = r.choice(loop.trained()).register_hook(r.choice((raises, lambda g: 0.9 * g)))
    try:
        loop.forward(r).backward()
    finally:
        handle.remove()


def reparametrize(loop, r):
    if parametrize.is_parametrized(loop.model.head):
        parametrize.remove_parametrizations(loop.model.head, "weight")
    else:
        r.choice((parametrizations.weight_norm, parametrizations.spectral_norm))(loop.model.head)
    loop.optimize()


def replace(loop, r):
    if r.random() < 0.5:
        loop.model = copy.deepcopy(loop.model)
    loop.model.blocks[r.randrange(len(loop.model.blocks))] = Block(r.choice(list(BLOCKS)))
    loop.optimize()


def replan(loop, r):
    if "_remat" in loop.model.__dict__:
        remat.of(loop.model).set_budget(r.choice(("150% of activations", "1 GiB")))


EVENTS = [evaluate, accumulate, freeze, load, autocast, later, some, fail, hook, reparametrize, replace, replan]


def left(seed, wrapped):
    """What is seen over the events of a seed: per event the kind of its exception, tensors, and all that the model holds."""
    loop, r, seen = Loop(seed, wrapped), random.Random(seed + 1), []
    for event in r.choices(EVENTS, k=8):
        name, loop.seen = None, []
        for act in (event, Loop.step):
            choose = random.Random(r.random())
            try:
                act(loop, choose)
            except (Raised, RuntimeError) as e:
                name = type(e)
                loop.optimizer.zero_grad()  # how far a backward came does not count
        model = loop.model
        loop.look(*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state())
        seen.append([name, loop.seen])
    return seen


def main():
    warnings.simplefilter("ignore")
    seeds = range(*map(int, sys.argv[1:3])) if len(sys.argv) > 2 else range(1000 if os.environ.get("REMAT_FULL") else 24)
    wrong = [seed for seed in seeds if not same(left(seed, False), left(seed, True))]
    print(f"{len(seeds)} loops, {len(wrong)} of them wrong: {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
