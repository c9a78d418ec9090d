"""Muon: orthogonal steps against a singular value decomposition, and Adam against torch's."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from fastbcd import Finetuner
from fastbcd.training.muon import BETAS, EPS, Muon, orthogonal
from helpers.nets import make
from helpers.train_cases import SMALL, assert_same, pair, weights


def conditioned(shape: tuple[int, ...], least: float) -> torch.Tensor:
    """A random matrix whose singular values lie between `least` and 1."""
    u, s, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    return u @ torch.diag_embed(torch.linspace(1, least, s.shape[-1]).expand_as(s)) @ v


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 4, 4), (3, 5, 40), (2, 30, 4), (1, 1, 7)])
def test_it_is_near_the_orthogonal_factor(shape) -> None:
    x = conditioned(shape, 0.1)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    truth, found = u @ v, orthogonal(1e3 * x)
    assert ((found - truth).flatten(1).norm(dim=1) < 0.4 * truth.flatten(1).norm(dim=1)).all()
    cosine = torch.cosine_similarity(found.flatten(1), truth.flatten(1))
    assert (cosine > 0.95).all()


def test_nothing_and_zeros_stay() -> None:
    assert torch.equal(orthogonal(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))
    weight = nn.Parameter(torch.randn(3, 4))
    optimizer = Muon([weight])
    before = weight.detach().clone()
    optimizer.step()  # no gradient
    weight.grad = torch.zeros(3, 4)
    optimizer.step()
    assert torch.equal(weight, before)


def plain_step(weight, grads, lr: float, momentum: float) -> torch.Tensor:
    """The steps of one weight, by the formula and with exact orthogonal factors."""
    moment = torch.zeros_like(weight)
    for grad in grads:
        moment = momentum * moment + grad
        u, _, v = torch.linalg.svd((grad + momentum * moment).flatten(1), full_matrices=False)
        turn = (u @ v).reshape(weight.shape)
        weight = weight - lr * weight.norm() * turn / turn.norm()
    return weight


@pytest.mark.parametrize("channels_last", [False, True])
def test_steps_are_relative_to_each_weight(channels_last) -> None:
    weights = [torch.randn(4, 3, 3, 3), 10 * torch.randn(4, 27), torch.randn(5, 2)]
    params = [nn.Parameter(w.clone()) for w in weights]
    if channels_last:
        params[0] = nn.Parameter(weights[0].to(memory_format=torch.channels_last))
    optimizer = Muon(params, lr=0.05, momentum=0.8)
    grads = [[conditioned((len(w), w.numel() // len(w)), 0.2).reshape(w.shape) for w in weights]
             for _ in range(3)]  # fmt: skip
    for number, some in enumerate(grads):
        for p, grad in zip(params, some, strict=True):
            p.grad = grad.clone() * 10.0 ** (3 * (number == 0))  # the first gradients are large
        optimizer.step()
    for i, (p, weight) in enumerate(zip(params, weights, strict=True)):
        given = [g[i] * 10.0 ** (3 * (n == 0)) for n, g in enumerate(grads)]
        truth = plain_step(weight, given, lr=0.05, momentum=0.8)
        assert (p.detach() - truth).norm() < 0.35 * (truth - weight).norm()
        assert (p.detach() - weight).norm() <= 0.16 * weight.norm()


def test_the_scale_of_the_loss_does_not_matter() -> None:
    found = []
    for scale in (1.0, 1e-4, 1e4):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(8, 6)
        optimizer = Muon([p for p in net.parameters() if p.ndim == 2], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (scale * net(x).square().mean()).backward()
            optimizer.step()
        found.append(net[0].weight.detach().clone())
    assert all(torch.allclose(found[0], other, atol=1e-4) for other in found[1:])


def test_adam_is_that_of_torch() -> None:
    ours, theirs = (nn.Parameter(torch.arange(6.0)) for _ in range(2))
    optimizers = (
        Muon([{"params": [ours], "adam": True}], lr=0.01),
        torch.optim.Adam([theirs], lr=0.01, betas=BETAS, eps=EPS),
    )
    for _ in range(5):
        ours.grad = torch.randn(6)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("name", ["resnet", "line", "poly", "mlp"])
def test_finetuning_learns_repeats_and_resumes(name) -> None:
    s = dataclasses.replace(SMALL, optimizer="muon", lr=0.02, epochs=4)
    net = make(name)
    twin, other = copy.deepcopy(net), copy.deepcopy(net)
    losses = [Finetuner(n, pair(), s).run(step=0)["loss"] for n in (net, twin)]
    assert_same(weights(net), weights(twin))
    first = Finetuner(copy.deepcopy(other), pair(), s).run(step=0, epochs=1)["loss"]
    assert losses[0] < first
    tuner, again = Finetuner(other, pair(), s), Finetuner(copy.deepcopy(other), pair(), s)
    with tuner.session():
        tuner.epoch(0, 0.02)
        state = tuner.state()
        tuner.epoch(1, 0.02)
        with again.session():
            again.load(state)
            again.epoch(1, 0.02)
    assert_same(weights(other), weights(again.net))
