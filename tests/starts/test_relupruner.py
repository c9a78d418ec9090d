"""relupruner: the published importance and schedule."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastbcd
from fastbcd import MaskedReLU
from fastbcd.masking.masks import mask_modules
from fastbcd.starts.relupruner import Pruner, relupruner, scheduled
from helpers.nets import make
from helpers.start_cases import NONE, data

QUICK = {"epochs": 5, "warmup": 1, "interval": 1, "lr": 0.01, "batch_size": 32, "finetune": NONE}

# ------------------------------------------------------------------ the published algorithm


class PublishedReLU(nn.Module):
    """Keeps its input, and its output with its gradient."""

    def __init__(self, act: MaskedReLU) -> None:
        super().__init__()
        self.keep, self.order = act.mask.clone().float(), act.order

    def forward(self, x):
        self.pre = x
        self.post = torch.relu(x * self.keep) + x * (1 - self.keep)
        self.post.retain_grad()
        return self.post


def published(net, train, budget, *, epochs, warmup, interval, lr, batch_size):
    """The mask training in plain PyTorch, one layer and one batch at a time; its importances."""
    teacher, student = copy.deepcopy(net).eval(), copy.deepcopy(net).train()
    for name, act in list(student.named_modules()):
        if isinstance(act, MaskedReLU):
            student.set_submodule(name, PublishedReLU(act))
    acts = [m for m in student.modules() if isinstance(m, PublishedReLU)]
    acts.sort(key=lambda act: act.order)
    sgd = torch.optim.SGD(student.parameters(), lr, momentum=0.9, weight_decay=5e-4)
    importance = [torch.zeros_like(a.keep) for a in acts]
    fisher, last = [torch.zeros_like(a.keep) for a in acts], [[] for _ in acts]
    norms, squares, weights = [0.0] * len(acts), [0.0] * len(acts), [1.0] * len(acts)
    total, batches, counts = sum(a.keep.numel() for a in acts), 0, []
    for epoch in range(epochs):
        for x, labels, _, _ in train.train_batches(
            batch_size, seed=0, step=0, epoch=epoch, padding=1
        ):
            s = student(x)
            with torch.no_grad():
                t = teacher(x)
            kd = F.kl_div(F.log_softmax(s / 4, 1), F.softmax(t / 4, 1), reduction="batchmean") * 16
            sgd.zero_grad()
            (F.cross_entropy(s, labels) + kd).backward()
            batches += 1
            for i, act in enumerate(acts):
                z, g = act.pre.detach(), act.post.grad
                last[i] = [*last[i], (z < 0).float().mean(0)][-10:]
                fisher[i] = 0.99 * fisher[i] + 0.01 * g.square().mean(0)
                value = (g * z).abs().mean(0) * torch.stack(last[i]).mean(0)
                value = value + 0.5 * z.square().mean(0) * fisher[i]
                importance[i] = 0.95 * importance[i] + 0.05 * weights[i] * value
                norms[i] = 0.95 * norms[i] + 0.05 * float(g.flatten(1).norm(dim=1).mean())
                squares[i] = 0.95 * squares[i] + 0.05 * float(g.square().mean())
            raw = [
                norms[i] * math.sqrt(squares[i] + 1e-8) * (1 + 0.2 * i / max(1, len(acts) - 1))
                for i in range(len(acts))
            ]
            spread = max(raw) - min(raw)
            weights = [(r - min(raw)) / spread + 0.1 if spread else 1.0 for r in raw]
            sgd.step()
            keep = scheduled(epoch, epochs=epochs, warmup=warmup, count=total, budget=budget)
            if epoch >= warmup and batches % (interval * (2 if keep == budget else 1)) == 0:
                flat = torch.cat([v.flatten() for v in importance])
                chosen = torch.zeros_like(flat)
                chosen[flat.topk(keep).indices] = 1
                parts = chosen.split([a.keep.numel() for a in acts])
                for act, part in zip(acts, parts, strict=True):
                    act.keep = part.view_as(act.keep)
        counts.append(int(sum(a.keep.sum() for a in acts)))
    bits = torch.cat([a.keep.flatten() for a in acts]).bool()
    return torch.cat([v.flatten() for v in importance]), bits, counts


@pytest.mark.parametrize("name", ["resnet", "mlp"])
def test_the_mask_training_is_the_published_one(name, monkeypatch) -> None:
    found, decide = [], Pruner.decide
    monkeypatch.setattr(Pruner, "decide", lambda s: found.append(s.values()) or decide(s))
    net, train = make(name), data()
    total = fastbcd.masks(net).count()
    settings = {k: v for k, v in QUICK.items() if k != "finetune"}
    values, bits, counts = published(net, train, total // 3, **settings)
    start = relupruner(net, train, total // 3, **QUICK)
    assert [r.count for r in start.history] == counts
    assert counts[0] == total > counts[2] > counts[-1] == total // 3
    torch.testing.assert_close(found[0], values, rtol=1e-2, atol=1e-7)
    assert (start.masks.bits != bits).sum() <= 0.02 * total, "units of equal importance, rounding"


def test_saliency_is_the_first_term_of_the_paper() -> None:
    """Eq. 6: the derivative of a sample's loss by the gate of a unit; E|.| is our saliency."""
    net, train = make("mlp").eval(), data(20)
    gates = []

    def gated(act, given, output):
        gates.append(torch.ones(len(output), *act.mask.shape, requires_grad=True))
        return gates[-1] * torch.relu(given[0]) + (1 - gates[-1]) * given[0]

    for act in mask_modules(net).values():
        act.register_forward_hook(gated)
    images, labels = next(train.batches(20))
    F.cross_entropy(net(images), labels, reduction="sum").backward()
    first = torch.cat([gate.grad.abs().mean(0).flatten() for gate in gates])
    torch.testing.assert_close(fastbcd.saliency(make("mlp"), train).float(), first)


def test_the_published_schedule() -> None:
    """Epochs 1 to 4 keep all; the cosine ends at epoch 92 of 150."""
    facts = {"epochs": 150, "warmup": 4, "count": 1000, "budget": 100}
    kept = [scheduled(epoch, **facts) for epoch in range(150)]
    assert kept[:5] == [1000] * 5
    assert kept[85] > kept[91] == kept[-1] == 100
    for epoch in (20, 50, 80):
        share = ((epoch - 4) / 87) ** 1.5
        assert kept[epoch] == int(100 + 900 * 0.5 * (1 + math.cos(math.pi * share)))


def test_of_more_than_the_budget_the_most_important_are_kept() -> None:
    found = relupruner(make("mlp"), data(32), 17, **{**QUICK, "interval": 1000})
    assert found.history[-1].count == 50
    assert found.masks.count() == 17


def test_frozen_layers_have_no_gradient() -> None:
    """Their ReLUs have no importance, and are removed first."""
    net = make("mlp")
    net.get_parameter("1.weight").requires_grad_(False)
    net.get_parameter("1.bias").requires_grad_(False)
    start = relupruner(net, data(), 20, **QUICK)
    assert list(start.masks.counts().values()) == [0, 20]
