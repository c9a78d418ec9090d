"""Returning ReLUs: the gain is what the loss falls by, the largest first, within the limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastbcd
from fastbcd import private
from fastbcd.descent import goals
from fastbcd.descent.budget import limits_of
from fastbcd.descent.saliency import gains


def problem(kind: type = fastbcd.MaskedReLU) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    """Three sites of 12, 8 and 6, all with removed ReLUs, the last one emptied."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(9, 12), kind(12), nn.Linear(12, 8), kind(8), nn.Linear(8, 6),
        kind(6), nn.Linear(6, 3),
    )  # fmt: skip
    fastbcd.set_masks(net, fastbcd.masks(net).without([*range(0, 12, 2), 13, 14, *range(20, 26)]))
    x = torch.randn(80, 1, 3, 3)
    return net, (x, x.flatten(1)[:, :3].argmax(1))


def loss(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(net(data[0]), data[1]))


@pytest.mark.parametrize("kind", [fastbcd.MaskedReLU, fastbcd.MaskedPoly])
def test_the_loss_falls_by_the_gain(kind) -> None:
    net, (x, labels) = problem(kind)
    net, data = net.double(), (x.double(), labels)
    with torch.no_grad():
        net[5].weight.mul_(1e-4)  # what the second site changes is small: the first order is enough
    kept = fastbcd.masks(net).copy()
    found, before = gains(net, data), loss(net, data)
    for unit in (13, 14):
        fastbcd.set_masks(net, kept.including(torch.tensor([unit])))
        assert before - loss(net, data) == pytest.approx(float(found[unit]), rel=1e-2)
        assert found[unit] != 0
    assert torch.equal(found.isinf(), kept.bits)


@pytest.mark.parametrize("budget", [15, 18, 19, 20, 26])
def test_the_largest_gains_of_sites_in_use_return(budget) -> None:
    net, data = problem()
    kept = fastbcd.masks(net).copy()
    found = gains(net, data)[:20]
    count = min(budget, 20) - kept.count()
    wanted = found.topk(count).indices.sort().values
    assert torch.equal(goals.to_return(net, data, limits_of(budget, net)), wanted)
    assert fastbcd.masks(net) == kept


def test_equal_gains_return_by_id(monkeypatch) -> None:
    net, data = problem()
    gain = torch.full((26,), -torch.inf).masked_fill(~fastbcd.masks(net).bits, 0.5).double()
    gain[8] = 0.7
    monkeypatch.setattr(goals, "gains", lambda net, data, loss: gain)
    assert goals.to_return(net, data, limits_of(15, net)).tolist() == [0, 2, 8]


def test_nothing_is_computed_where_nothing_can_return(monkeypatch) -> None:
    net, data = problem()
    monkeypatch.setattr(goals, "gains", lambda *a, **k: pytest.fail("a pass over the data"))
    for budget in (
        fastbcd.masks(net).count(),
        3,
        private.Target(bytes=12 * 464 + 463, activations_only=True),
    ):
        assert goals.to_return(net, data, limits_of(budget, net)).tolist() == []


class Empties(fastbcd.Proposal):
    """A step empties the first site in use; the first step also removes two ReLUs elsewhere."""

    def __call__(self, net, data, size, *, seed, step):
        raise NotImplementedError

    def toward(self, net, data, goal, *, seed, step):
        ids, _ = goal.without(goal.counts.nonzero()[0][:1])
        return lambda trial: torch.cat([ids, torch.tensor([22, 23])]) if step == 1 else ids


def test_relus_of_the_start_return_to_a_target(tmp_path) -> None:
    """The first step ends above the target: nothing returns. The second empties a site."""
    net, data = problem()
    start = fastbcd.masks(net).including(torch.tensor([20, 21, 22, 23]))
    fastbcd.set_masks(net, start)
    connection: dict[str, Any] = {"bandwidth": "10Mbit", "rtt": "1ms"}
    target = private.Target(0.0105, **connection, activations_only=True)
    run = fastbcd.bcd(
        net, data, target, rt=1, finetune=None, proposal=Empties(), run_dir=tmp_path / "run"
    )
    assert [s.sites for s in run.history] == [[0, 6, 2], [0, 0, 4]]
    assert [(s.before, s.drc, s.returned, s.after) for s in run.history] == [
        (16, 8, 0, 8), (8, 6, 2, 4),
    ]  # fmt: skip
    assert not (run.masks.bits & ~start.bits).any(), "24 and 25 were removed at the start"
    assert run.history[-1].cost == target.cost(net) <= 0.0105
    saved = fastbcd.load_run(tmp_path / "run", model=net)
    assert saved.done
    assert saved.masks == run.masks
    fastbcd.set_masks(net, run.masks.including(torch.tensor([24])))
    assert target.cost(net) > 0.0105
