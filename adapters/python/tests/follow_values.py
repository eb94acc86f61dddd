# SPDX-License-Identifier: Apache-2.0
"""Forwards that read values are planned, and equal eager mode bit by bit."""

import copy
import logging
import os
import random
import unittest

import numpy
import torch
import torch.nn.functional as F
from following import Net, Test, backward
from torch import nn

import remat


class Experts(nn.Module):
    """A mixture of experts with a loop over experts, as in models of Hugging Face. Each token goes to its best two experts."""

    def __init__(self, width, experts):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        result = torch.zeros_like(x)
        for k in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            which, token = torch.where(mask[k].squeeze(0))
            y = self.experts[k](x[token]) * weights[token, which, None]
            result.index_add_(0, token, y)
        return result


class Mixture(nn.Module):
    def __init__(self, width=16, experts=4, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms):
            x = x + self.drop(layer(norm(x)))
        return x


class Values(Test):
    def planned(self, make, step=backward, steps=6, **options):
        """Like `check`, and fails on a warning: no step may run unplanned."""
        with self.assertNoLogs("remat", logging.WARNING):
            return self.check(make, step, steps, **options)

    def acts(self, *acts, planned=True):
        for act in acts:
            class Asks(Net):
                def begin(self):
                    self.register_buffer("count", torch.zeros(()))
                    self.norms, self.seen = nn.BatchNorm1d(48), []

                def act(self, h):
                    return act(self, h).tanh()

            with self.subTest(act=act.__name__):
                self.planned(Asks) if planned else self.check(Asks, plans=False)

    def test_numbers(self):
        """Values that are constant, that change per step, or that choose the path; read before and after draws and running statistics."""
        def scaled(model, h):
            return h * h.detach().abs().max().item()

        def branch(model, h):
            return h.tanh() if h.sum() > 0 else h.relu()

        def check(model, h):
            assert not torch.isnan(h).any()
            return h.tanh()

        def several(model, h):
            for _ in range(4):
                h = h.sin() / (1 + abs(float(h.detach().mean())))
            return h

        def until(model, h):
            steps = 0
            while h.detach().norm() > 10 and steps < 8:
                h, steps = 0.7 * h.tanh(), steps + 1
            return h

        def after_draws(model, h):
            h = model.drop(h)
            return h * float(h.detach().mean()) + torch.rand_like(h)

        def after_statistics(model, h):
            h = model.norms(h)
            h = h * float(h.detach().std())
            return model.norms(h) + float(model.norms.running_mean[0])

        def of_parameter(model, h):
            return h * float(model.first.bias.detach()[0]) + float(model.first.weight.detach().abs().max())

        def of_input_mask(model, h):
            return h[: int((h[:, 0] > 0).sum().clamp(min=1))].sum(0) + h

        def counted(model, h):
            model.count += 1
            return h * float(model.count)

        def counted_twice(model, h):
            model.count += 1
            a = float(model.count)
            model.count += h.detach().mean()
            return h * a + float(model.count)

        def drawn_number(model, h):
            k = int(torch.randint(0, 20, ()))
            return h[:, k:k + 8].sum(1, keepdim=True) + h

        def from_constant(model, h):
            table = torch.arange(48.0).sin()
            table += h.detach()[0]
            return h * float(table.sum()) + table

        def written_after(model, h):
            y = h * 2
            a = float(y.detach().sum())
            y.mul_(a)
            b = float(y.detach().sum())
            y.add_(b)
            return y + float(y.detach().mean())

        def state(model, h):
            model.seen.append(float(h.detach().mean()))
            return h * (1 + sum(model.seen) / len(model.seen))

        self.acts(scaled, branch, check, several, until, after_draws, after_statistics, of_parameter, of_input_mask, counted,
                  counted_twice, drawn_number, from_constant, written_after, state)

    def test_tensors_whose_size_depends_on_values(self):
        def nonzero(model, h):
            rows = (h.detach()[:, 0] > 0).nonzero().squeeze(1)
            return h.index_add(0, rows, h[rows].tanh())

        def where(model, h):
            i, j = torch.where(h.detach() > 1)
            return h + torch.zeros_like(h).index_put((i, j), h[i, j].sin())

        def mask(model, h):
            m = h.detach()[:, 0] > 0
            return h + h[m].tanh().sum(0)

        def masks(model, h):
            m = h.detach() > 0.5
            return h + h[m].sin().sum() + h[:, m.any(0)].sum(1, keepdim=True)

        def put(model, h):
            m = h.detach()[:, 0] > 0
            y = h.clone()
            y[m] = h[m].tanh()
            return y * 2

        def put_number(model, h):
            y = h.clone()
            y[h.detach() > 1] = 1.0
            return y.masked_scatter(h.detach() > 0.5, h.detach().sin().flatten())

        def selected(model, h):
            return h + h.masked_select(h.detach() > 0.5).tanh().mean() + h[:, :1].masked_select(h.detach()[:, :1] > 0).sum()

        def scattered(model, h):
            m = h.detach() > 0.5
            rows = h.detach()[:, :1] > 0
            n = int(rows.sum()) * 48
            h = h.masked_scatter(m, h[m].sin())
            return h.masked_scatter(rows, h.flatten()[:n].cos().view(-1, 48)).clone().masked_scatter_(m, h.masked_select(m) * 2)

        def constant_mask(model, h):
            m = torch.arange(48) % 3 == 0
            return h[:, m].sum(1, keepdim=True) + h

        def constant_positions(model, h):
            return h + h[(torch.arange(32) > 3).nonzero()[:, 0]].sum(0)

        def one_hot(model, h):
            best = h.detach()[:, :6].argmax(-1)
            return h + F.one_hot(best).float().sum(0).mean() + F.one_hot(best, 6).float() @ h[:6]

        def unique(model, h):
            kinds, back = (h.detach()[:, 0] * 3).round().unique(return_inverse=True)
            return h + torch.zeros(len(kinds), 48).index_add(0, back, h)[back]

        def repeated(model, h):
            n = h.detach()[:4, 0].abs().ceil().long()
            return h + h[:4].repeat_interleave(n, 0).sum(0)

        def kept(model, h):
            model.seen = [(h.detach() > 0).nonzero(), h.detach().argmax(-1).tolist()]
            return h[model.seen[0][:, 0]].mean(0) + h

        self.acts(nonzero, where, mask, masks, put, put_number, selected, scattered, constant_mask, constant_positions, one_hot, unique, repeated, kept)

    def test_memory(self):
        def listed(model, h):
            return h * sum(h.detach()[0].tolist()) + h.detach().argmax(-1).tolist()[0]

        def by_numpy(model, h):
            return h + float(numpy.median(h.detach().cpu().numpy()))

        def buffer_by_numpy(model, h):
            model.count += h.detach().mean()
            return h * float(model.count.cpu().numpy()) + model.count.tolist()

        def printed(model, h):
            model.seen.append(repr(h.detach()))
            return h + len(model.seen[-1])

        def copied(model, h):
            model.seen = copy.deepcopy(h.detach())
            return h + model.seen.mean()

        self.acts(listed, by_numpy, printed)
        self.acts(buffer_by_numpy, copied, planned=False)

    def test_experts(self):
        """Each step takes a new path."""
        self.planned(Mixture, steps=10)
        self.planned(lambda: Mixture(layers=6, experts=8), steps=4)

    def test_other_backwards(self):
        """Unusual backwards after reads of values: a second backward, another use of outputs, gradients of gradients."""
        class Two(Net):
            def act(self, h):
                h = (h * float(h.detach().abs().max())).tanh()
                m = h.detach()[:, 0] > 0
                return h + h[m].mean(0)

            def forward(self, x):
                y = super().forward(x)
                return y, y.tanh()

        def retained(model, x, k):
            a, b = model(x)
            loss = a.square().mean() + b.mean()
            loss.backward(retain_graph=k % 2 == 1)
            if k % 2:
                loss.backward()

        def other_use(model, x, k):
            outputs = model(x)
            outputs[k % 2].square().mean().backward()

        def penalty(model, x, k):
            x.requires_grad_()
            a, b = model(x)
            (g,) = torch.autograd.grad(a.sum(), x, create_graph=True)
            (g.square().mean() + b.mean()).backward()

        for step in (retained, other_use):
            with self.subTest(step=step.__name__):
                self.check(Two, step)
        self.check(Two, penalty, 2)

    def test_other_use_of_a_path_with_other_numbers(self):
        """The loss uses another output. The step continues by a plan of the same calls for this use, with the numbers of this forward."""
        class Two(Net):
            def act(self, h):
                rows = h.detach()[:, 0] * 0 + torch.arange(float(len(h)))
                h = h * self.scale
                return (h + h[rows < self.rows].mean(0)).tanh()

            def forward(self, x):
                y = super().forward(x)
                return y, y.tanh()

        def step(model, x, k):
            model.scale, model.rows = 1.0 + k, (4, 5, 6)[k % 3 if k != 3 else 1]
            model(x)[k % 2].square().mean().backward()

        self.check(Two, step, steps=8)

    def test_what_stays_within_the_budget(self):
        """In deep models, neither the calls that run ahead nor the step exceed the budget."""
        class Deep(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(12))

            def forward(self, x):
                for layer in self.layers:
                    h = layer(x).tanh()
                    m = h.detach().mean(1) > 0
                    x = x + h * float(h.detach().abs().max())
                    x = x + h[m].sum(0)
                return x

        class WithLoss(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                return self.inner(x).square().mean()

        for make in (Deep, lambda: Mixture(128, 8, 3)):
            torch.manual_seed(0)
            model = WithLoss(make())
            session = remat.of(remat.wrap(model, activation_budget="50%", time_limit=1, cache=False))
            with self.assertNoLogs("remat", logging.WARNING):
                for k in range(6):
                    model.zero_grad()
                    session.reset_peak()
                    model(torch.randn(4096, 128)).backward()
                    if k:
                        held = session.memory()
                        self.assertLessEqual(held["peak"], held["budget"], f"step {k}")

    def test_errors(self):
        """A forward that raises after reads of values leaves all state as in eager mode."""
        class Raises(Net):
            def begin(self):
                self.steps = 0

            def act(self, h):
                self.steps += 1
                h = self.drop(h)
                if self.steps % 2 == 0 and float(h.detach().sum()) != 0:
                    raise KeyError(float(h.detach().max()))
                return h * float(h.detach().mean())

        def step(model, x, k):
            try:
                backward(model, x, k)
            except KeyError as e:
                return [torch.tensor(e.args[0])]

        self.check(Raises, step, 8)

    def test_random_programs(self):
        """Random programs that read values at random places, of tensors that were written, drawn, or made much earlier."""
        for seed in range(int(os.environ.get("REMAT_FULL", 0)) and 300 or 30):
            def make():
                class Program(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
                        self.norm = nn.BatchNorm1d(16)
                        self.register_buffer("state", torch.ones(16))
                        self.steps = 0

                    def forward(self, x):
                        self.steps += 1
                        choose = random.Random(seed)
                        list = [x]
                        for k in range(choose.randint(4, 14)):
                            h = choose.choice(list)
                            kind = choose.randrange(14)
                            if kind < 3:
                                h = choose.choice(self.layers)(h)
                            elif kind == 3:
                                h = self.norm(h)
                            elif kind == 4:
                                h = F.dropout(h, 0.2)
                            elif kind == 5:
                                h = h * torch.rand_like(h)
                            elif kind == 6:
                                h = (h * 1).mul_(0.5)
                            elif kind == 7:
                                self.state.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
                                h = h + self.state
                            elif kind == 8:
                                h = h.tanh() if float(h.detach().sum()) > 0 else h.sin()
                            elif kind == 9:
                                h = h + h[h.detach()[:, 0] > 0].sum(0) * 0.1
                            elif kind == 10:
                                h = h * (1 + 0.1 * float(self.state.max()))
                            elif kind == 11:
                                rows = (h.detach()[:, 1] > 0.3).nonzero()[:, 0]
                                h = h.index_add(0, rows, h[rows] * 0.1)
                            elif kind == 12:
                                t = torch.linspace(0, 1, 16)
                                t += h.detach().mean()
                                h = h + t * t.sum().item()
                            else:
                                h = h / (1 + h.detach().abs().max().item())
                            list.append(h)
                        return sum(list[1:]) / len(list)

                return Program()

            with self.subTest(seed=seed):
                self.planned(make, steps=4)


if __name__ == "__main__":
    unittest.main()
