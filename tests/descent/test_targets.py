"""BCD to a cost: it ends at or below the target, as close as one ReLU allows, and resumes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import private
from fastbcd.descent.budget import counts_of, limits_of
from fastbcd.private import PROTOCOLS, Constant
from fastbcd.runs import fingerprint as snapshots
from helpers.run_cases import contents, nudge

Target = partial(private.Target, activations_only=True)
cost = partial(private.cost, activations_only=True)
NETWORK = {"protocol": "crypten", "bandwidth": "10Mbit", "rtt": "1ms"}  # a site: 24 ReLUs' time
CONSTANT = replace(PROTOCOLS["delphi-gc"], relu_rounds=Constant(0, "rounds do not depend on it"))
QUICK: dict[str, Any] = {"drc": fastbcd.Fraction(0.2), "rt": 3, "finetune": None}


def net_of(*kinds: type, seed: int = 0) -> nn.Module:
    """One site of 40, 30, 20, … neurons for each kind of activation."""
    torch.manual_seed(seed)
    layers, width = [nn.Flatten()], 16
    for number, kind in enumerate(kinds):
        size = 40 - 10 * number
        layers += [nn.Linear(width, size), kind(size)]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, 3))


def plain() -> nn.Module:
    return net_of(*[fastbcd.MaskedReLU] * 3)


def data(n: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return x, x.flatten(1)[:, :3].argmax(1)


class LastFirst(fastbcd.Proposal):
    def __call__(self, net, data, size, *, seed, step):
        kept = fastbcd.masks(net).bits.nonzero().flatten()
        return lambda trial: kept.flip(0)[:size]


PROPOSALS = [None, "uniform", "saliency", "blocks", fastbcd.Blocks(0), LastFirst()]


# ------------------------------------------------------------------------------ the end


TARGETS = [
    Target(0.012, **NETWORK), Target(bytes="10kB"), Target(rounds=20), Target(bytes=100),
    Target(0.03, **NETWORK, relus=20), Target(rounds=18, relus=9),
]  # fmt: skip
CASES = [(Target(0.03, **NETWORK), proposal) for proposal in PROPOSALS]
CASES += [(target, proposal) for target in TARGETS for proposal in ("blocks", "uniform")]


@pytest.mark.parametrize(("target", "proposal"), CASES)
def test_a_run_ends_as_close_to_the_target_as_one_relu_allows(target, proposal) -> None:
    net = plain()
    run = fastbcd.bcd(net, data(), target, proposal=proposal, **QUICK)
    assert target.met(net)
    found = cost(net, target.protocol, bandwidth=target.bandwidth, rtt=target.rtt)
    assert run.history[-1].cost == getattr(found, target.quantity) <= target.most
    costs = [step.cost for step in run.history]
    assert all(step.after == sum(step.sites) for step in run.history)
    assert all(later <= earlier for earlier, later in itertools.pairwise(costs))
    limits, counts = limits_of(target, net), counts_of(run.masks)
    if target.quantity != "rounds" or target.relus is not None:
        for x in ((counts > 0) & (counts < limits.units)).nonzero()[0]:
            counts[x] += 1  # one more ReLU in a site in use is too much
            assert not limits.met(counts)
            counts[x] -= 1
    else:  # rounds alone: all sites in use are full
        assert set((counts / limits.units).tolist()) == {0.0, 1.0}


def test_blocks_empty_sites_and_keep_more_relus_than_single_removals() -> None:
    target = Target(0.03, **NETWORK)
    kept = {}
    for proposal in ("blocks", "saliency"):
        run = fastbcd.bcd(plain(), data(), target, proposal=proposal, **QUICK)
        kept[proposal] = [n for n in run.masks.counts().values() if n]
    assert len(kept["blocks"]) < len(kept["saliency"])
    assert sum(kept["blocks"]) > sum(kept["saliency"])


@pytest.mark.parametrize(
    "kinds", [[fastbcd.MaskedPoly] * 3, [fastbcd.MaskedPoly, fastbcd.MaskedReLU]]
)
@pytest.mark.parametrize("proposal", ["blocks", "uniform"])
def test_quadratics_cost_too(kinds, proposal) -> None:
    net = net_of(*kinds)
    least = Target(0.5, **NETWORK).cost(fastbcd.masks(net).without(range(fastbcd.masks(net).total)),
                                        poly=[str(2 + 2 * i) for i, k in enumerate(kinds)
                                              if k is fastbcd.MaskedPoly])  # fmt: skip
    target = Target(1.4 * least + 0.01, **NETWORK)
    run = fastbcd.bcd(net, data(), target, proposal=proposal, **QUICK)
    assert run.history[-1].cost == target.cost(net) <= target.most
    assert target.cost(net) > 0.9 * target.most
    with pytest.raises(ValueError, match="which is the least"):
        fastbcd.bcd(net, data(), Target(0.9 * least, **NETWORK), **QUICK)


def test_where_rounds_are_constant_a_target_finds_the_nets_of_the_count() -> None:
    by_count = net_of(*[fastbcd.MaskedReLU] * 3)
    options: dict[str, Any] = {**QUICK, "rt": 4, "adt": -1.0, "finetune": nudge}
    counted = fastbcd.bcd(by_count, data(), 25, proposal="saliency", **options)
    target = Target(cost(by_count, CONSTANT, rtt="40ms").seconds, protocol=CONSTANT, rtt="40ms")
    for drc in (options["drc"], 13):
        counted = fastbcd.bcd(plain(), data(), 25, proposal="saliency", **{**options, "drc": drc})
        net = plain()
        found = fastbcd.bcd(net, data(), target, **{**options, "drc": drc})
        assert [step.drc for step in found.history] == [step.drc for step in counted.history]
        assert [step.drops for step in found.history] == [step.drops for step in counted.history]
        assert found.masks == counted.masks


# --------------------------------------------------------------------------------- sites


SITES = [(15, 2, proposal) for proposal in PROPOSALS]
SITES += [(budget, most, "blocks") for budget, most in ((15, 1), (40, 1), (0, 0), (70, 3))]


@pytest.mark.parametrize(("budget", "most", "proposal"), SITES)
def test_max_sites_with_a_count(budget, most, proposal) -> None:
    net = plain()
    run = fastbcd.bcd(net, data(), budget, proposal=proposal, max_sites=most, **QUICK)
    sites = zip(run.masks.sites, run.history[-1].sites, strict=True)
    used = [site.numel for site, n in sites if n]
    assert run.masks.count() == min(budget, sum(used))
    assert len(used) <= most
    assert all(step.cost is None for step in run.history)


def test_max_sites_when_the_count_is_met_already() -> None:
    net = plain()
    fastbcd.set_masks(net, fastbcd.masks(net).without([*range(2, 40), *range(43, 70)]))
    counts = [*fastbcd.masks(net).counts().values()]
    assert counts == [2, 3, 20]
    run = fastbcd.bcd(net, data(), 20, max_sites=1, drc=3, finetune=None, rt=2)
    assert run.masks.count() == 20
    net = plain()
    run = fastbcd.bcd(net, data(), Target(1.0, **NETWORK), max_sites=1, **QUICK)
    assert [sum(n > 0 for n in step.sites) for step in run.history] == [2, 1]  # one per step
    assert run.masks.count() in (40, 30, 20)


def test_sites_are_emptied_on_the_way_down() -> None:
    net = net_of(*[fastbcd.MaskedReLU] * 4)
    run = fastbcd.bcd(net, data(), 8, max_sites=1, **{**QUICK, "drc": fastbcd.Fraction(0.3)})
    used = [sum(n > 0 for n in step.sites) for step in run.history]
    assert used == sorted(used, reverse=True)
    assert {4, 3, 2, 1} - {used[0]} <= set(used)


# ------------------------------------------------------------------------ runs and refusals


def started(folder: Any, stop: int | None = None, **changed: Any) -> fastbcd.Run:
    """A run that trains; `stop`: it is interrupted in that step."""

    def train(net: nn.Module, step: fastbcd.Step) -> None:
        if step.number == stop:
            raise KeyboardInterrupt
        nudge(net, step)

    train.__qualname__ = "train"
    options = {**QUICK, "finetune": train, "run_dir": folder, **changed}
    budget = options.pop("budget", Target(0.03, **NETWORK, relus=40))
    return fastbcd.bcd(plain(), data(), budget, **options)


ENDS = [
    {"budget": Target(0.03, **NETWORK, relus=20)}, {"budget": 12, "max_sites": 2},
    {"budget": 20, "max_sites": 1},  # ReLUs return in the third step
]  # fmt: skip


@pytest.mark.parametrize("changed", ENDS)
def test_an_interrupted_run_ends_as_one_that_was_not(changed, tmp_path) -> None:
    whole = started(tmp_path / "whole", **changed)
    assert len(whole.history) >= 3
    assert any(step.returned for step in whole.history) == (changed.get("max_sites") == 1)
    for stop in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            started(tmp_path / f"{stop}", stop, **changed)
        saved = fastbcd.load_run(tmp_path / f"{stop}")
        assert (saved.done, len(saved.history)) == (False, stop - 1)
        started(tmp_path / f"{stop}", **changed)
        assert contents(tmp_path / f"{stop}") == contents(tmp_path / "whole")
    saved = fastbcd.load_run(tmp_path / "whole")
    assert saved.done
    assert snapshots.take(saved.fill(plain())).keys() == snapshots.take(whole.model).keys()


def test_another_target_is_refused_by_its_difference(tmp_path) -> None:
    started(tmp_path / "a")
    settings = json.loads((tmp_path / "a/config.json").read_text())["settings"]
    assert settings["budget"]["seconds"] == 0.03
    assert settings["proposal"]["name"] == "blocks"
    for name, other in {
        "budget.seconds is 0.03 there and 0.04 now": Target(0.04, **NETWORK, relus=40),
        "budget.rtt is 0.001 there": Target(0.03, **{**NETWORK, "rtt": 0}, relus=40),
        "budget.relus is 40 there and .missing. now": Target(0.03, **NETWORK),
    }.items():
        with pytest.raises(ValueError, match=name):
            started(tmp_path / "a", budget=other)
    dearer = replace(PROTOCOLS["crypten"], relu_bytes=Constant(500, "ours"))
    with pytest.raises(ValueError, match=r"figures\.relu_bytes is 464 there and 500 now"):
        started(tmp_path / "a", budget=Target(0.03, **{**NETWORK, "protocol": dearer}, relus=40))
    with pytest.raises(ValueError, match=r"max_sites is null there and 3 now"):
        started(tmp_path / "a", max_sites=3)


def test_a_target_that_is_met_is_done_at_once(capsys, tmp_path) -> None:
    run = started(tmp_path / "a", budget=Target(9.0, **NETWORK))
    assert (run.history, run.masks.count()) == ([], 90)
    assert "is done: 0 steps, 90 ReLUs kept" in capsys.readouterr().out
    assert fastbcd.load_run(tmp_path / "a").done


STARTS: dict[str, dict[str, Any]] = {
    "snl": {"max_epochs": 2}, "autorep": {"epochs": 2}, "senet": {"epochs": 1},
    "deepreduce": {"epochs": 10, "trial_epochs": 1},
    "relupruner": {"epochs": 2, "warmup": 1, "interval": 1},
}  # fmt: skip


def assert_close_to(target: Target, net: nn.Module, start: fastbcd.MaskSet) -> None:
    """At or below the target, and above it with any other ReLU that a site in use has."""
    kept, limits = fastbcd.masks(net), limits_of(target, net)
    assert target.met(net)
    assert kept.count() > 0
    assert not (kept.bits & ~start.bits).any(), "removed ReLUs stay removed"
    counts, most = counts_of(kept), counts_of(start)
    for x in ((counts > 0) & (counts < most)).nonzero()[0]:
        counts[x] += 1
        assert not limits.met(counts)
        counts[x] -= 1


@pytest.mark.filterwarnings("ignore:after .* epochs:RuntimeWarning")
@pytest.mark.parametrize("method", STARTS)
def test_starting_points_take_targets(method, tmp_path) -> None:
    target, net = Target(0.034, **NETWORK), plain()
    fastbcd.set_masks(net, start := fastbcd.masks(net).without([3, 50, 51, 80]))
    options = {**STARTS[method], "finetune": None, "run_dir": tmp_path / "run"}
    found = getattr(fastbcd, method)(net, data(), target, **options)
    assert_close_to(target, found.model, start)
    assert found.masks == fastbcd.masks(found.model)
    assert fastbcd.load_run(tmp_path / "run").settings["budget"]["seconds"] == 0.034
    with pytest.raises(ValueError, match=r"is met"):
        getattr(fastbcd, method)(plain(), data(), Target(9.0, **NETWORK))


def test_linearize_takes_a_target(tmp_path) -> None:
    options: dict[str, Any] = {"epochs": 3, "padding": 0, "progress": False, "rt": 2}
    for target, most in ((Target(0.02, **NETWORK), None), (Target(0.02, **NETWORK), 1)):
        run = fastbcd.linearize(plain(), data(), target, max_sites=most, **options)
        assert target.met(run.model)
        assert sum(step.epochs for step in run.history) == pytest.approx(3)
        if most is None:
            assert_close_to(target, run.model, fastbcd.masks(plain()))
        else:
            assert sum(n > 0 for n in run.masks.counts().values()) == most
