"""Signals, volumes, feature vectors and sequences: convert, score, saliency and bcd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastbcd
from helpers.nets import randomize


def signal() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 6, 3, 2),
        nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


def volume() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 4, 3, 2),
        nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 4),
    )  # fmt: skip


def vector() -> nn.Module:
    layers = nn.Linear(3, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(9, 4))


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4))


NETS = [(signal, (3, 9)), (volume, (3, 5, 5, 5)), (vector, (3,)), (sequence, (3, 5))]


def effects(net: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """E|dL/da · min(z, 0)| by autograd, for the ReLUs of each site."""
    inputs, outputs = [], []

    def record(module, args, output) -> None:
        inputs.append(args[0])
        outputs.append(output)

    for module in net.modules():
        if isinstance(module, fastbcd.MaskedReLU):
            module.register_forward_hook(record)
    loss = F.cross_entropy(net(x).double(), labels, reduction="sum")
    grads = torch.autograd.grad(loss, outputs)
    found = [(g * z.clamp(max=0)).abs().mean(0) for g, z in zip(grads, inputs, strict=True)]
    return torch.cat([f.flatten() for f in found]).detach()


@pytest.mark.parametrize(("make", "shape"), NETS, ids=lambda v: getattr(v, "__name__", ""))
def test_inputs_of_any_rank(make, shape) -> None:
    torch.manual_seed(0)
    model = randomize(make()).eval()
    x, labels = torch.randn(40, *shape), torch.arange(40) % 4
    net = fastbcd.convert(model, x[:2])
    assert torch.equal(net(x), model(x))
    masks = fastbcd.masks(net)
    ids = torch.stack([masks.sample(5, seed=0, step=0, trial=t) for t in range(3)])
    truth = fastbcd.score(net, ids, (x, labels), engine="sequential")
    for engine in ("stacked", "collapsed", "auto"):
        found = fastbcd.score(net, ids, (x, labels), engine=engine)
        assert found.correct.tolist() == truth.correct.tolist()
        torch.testing.assert_close(found.loss, truth.loss)
    found = fastbcd.saliency(net, (x, labels)).float()
    torch.testing.assert_close(found, effects(fastbcd.convert(model, x[:2]), x, labels))
    tune = fastbcd.Finetune(epochs=1, lr=1e-3, batch_size=16, padding=0, flip=False)
    run = fastbcd.bcd(
        net, (x, labels), budget=masks.total - 6, drc=3, rt=2, adt=0.1, finetune=tune,
        proposal="saliency",
    )  # fmt: skip
    assert run.masks.count() == fastbcd.masks(run.model).count()
    assert run.model(x).isfinite().all()
    poly = fastbcd.convert(model, x[:2], replacement="poly")
    one, many = (
        fastbcd.score(poly, ids, (x, labels), engine=engine) for engine in ("sequential", "stacked")
    )
    torch.testing.assert_close(one.loss, many.loss)
