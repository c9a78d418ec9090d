"""auto: which engine it takes where multiply-adds do not tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastbcd import MaskedReLU, masks, score
from fastbcd.scoring import plan
from helpers.nets import images, make, thinned


def grouped() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), MaskedReLU((8, 6, 6)), nn.Conv2d(8, 8, 3, groups=8),
        MaskedReLU((8, 4, 4)), nn.Conv2d(8, 6, 1), nn.Flatten(), nn.Linear(96, 5),
    ).eval()  # fmt: skip


def engine_for(net, number: int = 41) -> str:
    removals = [masks(net).sample(3, seed=0, step=0, trial=t) for t in range(6)]
    return score(net, removals, images(number)).engine


@pytest.fixture
def timed(monkeypatch) -> dict[str, float]:
    """What the timing of an engine gives, by its name; calls are counted."""
    given = {"stacked": 1.0, "sequential": 1.0, "calls": 0}

    def seconds(made, lanes=None):
        given["calls"] += 1
        return given[made.engine.name]

    monkeypatch.setattr(plan, "seconds", seconds)
    monkeypatch.setattr(plan, "SAMPLE", 1)
    monkeypatch.setattr(plan, "REPEATS", 1)
    return given


@pytest.mark.parametrize(("stacked", "engine"), [(1.1, "sequential"), (0.9, "stacked")])
def test_stacked_is_not_taken_where_it_is_slower(timed, stacked, engine, capsys) -> None:
    net, timed["stacked"] = grouped(), stacked
    assert [engine_for(net), engine_for(net)] == [engine, engine]
    assert timed["calls"] == 2  # both engines, once for a net
    removals = [masks(net).sample(3, seed=0, step=0, trial=t) for t in range(6)]
    score(net, removals, images(41), explain=True)
    assert ("as timed on this machine" in capsys.readouterr().out) == (engine == "sequential")
    assert score(net, removals, images(41), engine="stacked").engine == "stacked"


def test_only_large_calls_of_grouped_convolutions_are_timed(timed) -> None:
    timed["stacked"] = 9.0
    assert engine_for(thinned(make("resnet"))) == "stacked"
    assert engine_for(grouped(), number=4) == "stacked"
    assert timed["calls"] == 0


def test_timing_leaves_the_masks_as_they_were(monkeypatch) -> None:
    monkeypatch.setattr(plan, "SAMPLE", 2)
    monkeypatch.setattr(plan, "REPEATS", 1)
    found, plain = [], plan.seconds
    monkeypatch.setattr(plan, "seconds", lambda *a: found.append(plain(*a)) or found[-1])
    net = grouped()
    before = masks(net).copy()
    removals = [masks(net).sample(3, seed=0, step=0, trial=t) for t in range(6)]
    truth = score(net, removals, images(90), engine="sequential")
    assert torch.allclose(score(net, removals, images(90)).loss, truth.loss)
    assert len(found) == 2
    assert min(found) > 0
    assert masks(net) == before
