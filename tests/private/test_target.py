"""Targets: the costs of `private.cost`, limits that are met and not undercut, refusals."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fastbcd
from fastbcd import private
from fastbcd.descent.budget import Limits, counts_of, limits_of, relus, sites
from fastbcd.private import Constant, Protocol, units

Target = partial(private.Target, activations_only=True)
UNCOUNTED = replace(private.PROTOCOLS["spu-cheetah"], relu_rounds=Constant(None, "not counted"))
WAN = {"bandwidth": "100Mbit", "rtt": "40ms"}


def net_of(sizes: list[int], poly: list[bool]) -> nn.Module:
    kinds = [fastbcd.MaskedPoly if p else fastbcd.MaskedReLU for p in poly]
    return nn.Sequential(*(kind((n, 1)) for kind, n in zip(kinds, sizes, strict=True)))


nets = st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=5)


# ---------------------------------------------------------------------------- cost


@given(nets, st.integers(0, 2**32), st.sampled_from(["seconds", "bytes", "rounds"]))
@settings(max_examples=60, deadline=None)
def test_a_target_measures_what_cost_does(sites_, seed, quantity) -> None:
    """To the last bit, so that a target that is a net's own cost is met by that net."""
    sizes, poly = [n for n, _ in sites_], [p for _, p in sites_]
    net = net_of(sizes, poly)
    full = fastbcd.masks(net).copy()
    gone = torch.rand(full.total, generator=torch.Generator().manual_seed(seed)) < 0.6
    fastbcd.set_masks(net, full.without(gone.nonzero().flatten()))
    for name in ("crypten", "delphi-gc") if not any(poly) else ("crypten",):
        expected = getattr(private.cost(net, name, **WAN, activations_only=True), quantity)
        target = Target(**{quantity: expected}, protocol=name, **WAN)
        limits = limits_of(target, net)
        assert limits.value(counts_of(fastbcd.masks(net))) == expected == target.cost(net)
        assert target.met(net)


def test_the_set_up_counts() -> None:
    constants = [Constant(v, "here") for v in (100, 1e-6, 4)]
    ours = Protocol("ours", *constants, setup_seconds=Constant(2, "here"))
    net = net_of([3, 3], [False, False])
    assert limits_of(Target(3, protocol=ours, **WAN), net).least() == 2
    with pytest.raises(ValueError, match=r"without ReLUs costs 2\.00 s, which is the least"):
        limits_of(Target(1.9, protocol=ours, **WAN), net)


# --------------------------------------------------------------------------- limits


def after(counts: np.ndarray, where: np.ndarray, gone: np.ndarray) -> np.ndarray:
    return counts - np.bincount(where[gone], minlength=len(counts))


def some_limits(sites_, seed, share, mixed, bounded) -> tuple[Limits, np.ndarray]:
    """Limits between nothing and a mask, and the counts of that mask."""
    sizes = np.array([n for n, _ in sites_])
    poly = np.array([p and mixed for _, p in sites_])
    random = np.random.default_rng(seed)
    counts = random.integers(0, sizes + 1)
    rtt = str(random.choice(["0ms", "1ms", "40ms"]))
    target = Target(1e9, protocol="crypten", bandwidth="1Mbit", rtt=rtt)
    limits = Limits(sizes, poly, target.bounds(sizes, poly))
    value = limits.least() + share * max(limits.value(counts) - limits.least(), 0)
    if bounded:
        limits = replace(limits, bounds=(*limits.bounds, sites(2)))
    return limits.at_most(value), counts


CASE = (nets, st.integers(0, 2**32), st.floats(0, 1), st.booleans(), st.booleans())


@given(*CASE)
@settings(max_examples=300, deadline=None)
def test_a_fit_meets_the_limits_and_wastes_no_relu(sites_, seed, share, mixed, bounded) -> None:
    """The cost is within one ReLU of the limit, in any site in use; the reference tries each."""
    limits, counts = some_limits(sites_, seed, share, mixed, bounded)
    where = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    left = after(counts, where, limits.fit(counts, where))
    assert limits.met(left)
    for x in np.flatnonzero((left > 0) & (left < counts)):
        assert not limits.met(left + (np.arange(len(left)) == x)), (left, x)


@given(*CASE)
@settings(max_examples=300, deadline=None)
def test_returned_relus_against_one_after_the_other(sites_, seed, share, mixed, bounded) -> None:
    """The first that fits, again and again, until none does."""
    limits, most = some_limits(sites_, seed, share, mixed, bounded)
    random = np.random.default_rng(seed)
    counts = random.integers(0, most + 1)
    where = random.permutation(np.repeat(np.arange(len(most)), limits.units - counts))
    found = limits.back(counts, where)
    now, waiting = counts.copy(), list(range(len(where)))

    def fits(n: int) -> bool:
        return now[where[n]] > 0 and limits.met(now + (np.arange(len(now)) == where[n]))

    if not limits.poly.any():
        while (n := next(filter(fits, waiting), None)) is not None:
            waiting.remove(n)
            now[where[n]] += 1
        assert np.flatnonzero(~found).tolist() == waiting
    now = counts + np.bincount(where[found], minlength=len(counts))
    assert not any(fits(n) for n in np.flatnonzero(~found))
    assert limits.met(now) or not found.any()


@given(nets.filter(lambda found: sum(n for n, _ in found) <= 12), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_returned_relus_against_all_sets(sites_, seed) -> None:
    """No other set of ReLUs of the sites in use that is within the limits gains more."""
    limits, most = some_limits(sites_, seed, 0.7, mixed=False, bounded=True)
    random = np.random.default_rng(seed)
    counts = random.integers(0, most + 1)
    if not limits.met(counts):
        return
    where = np.repeat(np.arange(len(most)), limits.units - counts)
    gain = random.random(len(where))
    order = np.argsort(-gain)
    found = gain[order[limits.back(counts, where[order])]].sum()
    best = 0.0
    for chosen in itertools.product([False, True], repeat=len(where)):
        kept = np.array(chosen, dtype=bool)
        new = counts + np.bincount(where[kept], minlength=len(counts))
        if (counts[where[kept]] > 0).all() and limits.met(new):
            best = max(best, gain[kept].sum())
    assert found == pytest.approx(best)


def test_a_count_is_a_prefix() -> None:
    units_, where = np.array([4, 4]), np.array([0, 1, 1, 0, 1])
    limits = Limits(units_, np.array([False, False]), (relus(5),))
    removed = limits.fit(units_, where)
    assert removed.tolist() == [True, True, True, False, False]
    assert limits.size(units_) == 3


def test_a_step_saves_the_share_of_its_relus() -> None:
    net = net_of([60, 40], [False, False])
    counts = counts_of(fastbcd.masks(net))
    limits = limits_of(Target(0.1, **WAN), net)
    value = limits.value(counts)
    goal = limits.step(counts, 10, (value, 2)).bounds[0].most
    assert goal == pytest.approx(0.9 * value)
    assert limits.step(counts, 100, (value, 2)).bounds[0].most == 0.1  # never below the target
    by_count = limits_of(50, net).step(counts, 10, (100, 2))
    assert by_count.size(counts) == 10


def test_savings_are_differences_of_the_value() -> None:
    """Of one ReLU less, and of emptying a site, where quadratics are, will be and cannot be."""
    sizes, poly = np.array([5, 6, 7]), np.array([True, True, False])
    limits = Limits(sizes, poly, Target(9, **WAN).bounds(sizes, poly))
    counts = np.array([5, 3, 4])  # the first site has no square yet
    single, emptying = limits.savings(counts)
    for site in range(3):
        without = np.where(np.arange(3) == site, 0, counts)
        saved = limits.value(counts) - limits.value(without)
        assert saved == pytest.approx(counts[site] * single[site] + emptying[site])
    one_less = np.array([5, 2, 4])
    assert limits.value(counts) - limits.value(one_less) == pytest.approx(single[1])


def test_the_bound_on_sites_falls_evenly_with_the_logarithm() -> None:
    net = net_of([1000] * 8, [False] * 8)
    limits, counts = limits_of(1000, net, max_sites=2), counts_of(fastbcd.masks(net))
    allowed = []
    for count in (8000, 4000, 2000):  # half of them goes in each step
        now = np.full(8, count // 8)
        allowed.append(limits.step(now, count // 2, (8000, 8)).most_sites())
    assert allowed == [6, 4, 2]
    assert limits_of(9000, net, 8).met(counts)
    met = limits_of(8000, net_of([1000] * 9, [False] * 9), max_sites=8)
    assert met.step(np.full(9, 100), 100, (900, 9)).most_sites() == 8  # one site per step


# -------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "one of seconds, bytes, rounds; nothing was given"),
        ({"seconds": 1, "rounds": 9}, "seconds and rounds was given"),
        ({"seconds": -1}, "seconds=-1; give seconds, 0 or more"),
        ({"seconds": "1 hour"}, "seconds='1 hour'; give seconds"),
        ({"bytes": "20bit"}, "bytes='20bit'; give bytes"),
        ({"rounds": -1}, "rounds=-1"),
        ({"bytes": 10**400}, r"bytes=100000\d*\.\.\.0+; give bytes"),
        ({"seconds": 1, "bandwidth": "100"}, "bandwidth='100'; give it with its unit"),
        ({"seconds": 1, "bandwidth": 1e9}, "bandwidth=1000000000.0; give it with its unit"),
        ({"seconds": 1, "bandwidth": "fast"}, "bandwidth='fast'; give it with its unit"),
        ({"seconds": 1, "rtt": "40"}, "rtt='40'; give it with its unit, such as '40ms'"),
        ({"seconds": 1, "rtt": 0.04}, "rtt=0.04; give it with its unit"),
        ({"seconds": 1, "rtt": True}, "rtt=True; give it with its unit"),
        ({"seconds": 1, "bandwidth": math.inf, "rtt": 0}, None),
        ({"seconds": 1, "protocol": "crypton"}, "did you mean 'crypten'"),
        ({"seconds": 1, "protocol": "spu-semi2k"}, None),
        ({"rounds": 1, "protocol": UNCOUNTED},
         "rounds cannot be a target under 'spu-cheetah': its relu_rounds is unknown"),
        ({"rounds": 1, "weights_of": "client"}, "weights_of='client'; choose from both, server"),
        ({"bytes": 1, "protocol": "spu-cheetah"}, None),
        ({"seconds": 1, "relus": -1}, "relus=-1"),
    ],
)  # fmt: skip
def test_targets_refuse(arguments, message) -> None:
    if message is None:
        Target(**arguments)
    else:
        with pytest.raises(ValueError, match=message):
            Target(**arguments)


def test_targets_refuse_a_net() -> None:
    poly, plain = net_of([4], [True]), net_of([4], [False])
    with pytest.raises(ValueError, match="its square_bytes is unknown"):
        limits_of(Target(bytes=1e6, protocol="delphi-gc"), poly)
    assert Target(bytes=1e6, protocol="delphi-gc").met(plain)
    with pytest.raises(ValueError, match=r"without ReLUs costs 64\.0 B, which is the least"):
        limits_of(Target(bytes=60), poly)
    dear = [Constant(v, "here") for v in (1, 1e-6, 1, 2, 1e-6, 1)]
    with pytest.raises(ValueError, match="a square costs more than a ReLU"):
        limits_of(Target(bytes=8, protocol=Protocol("dear", *dear)), poly)
    with pytest.raises(TypeError, match=r"budget=1\.5"):
        limits_of(1.5, plain)  # type: ignore[arg-type]


def test_units() -> None:
    assert units.bits_per_second("1Gbit") == units.bits_per_second("1 Gbps") == 1e9
    assert units.bits_per_second("40MB/s") == 3.2e8
    assert units.round_trip("250us") == units.round_trip("250µs") == pytest.approx(2.5e-4)
    assert units.in_bytes("1.5kB") == units.in_bytes(1500) == 1500
    for read in (units.bits_per_second, units.round_trip, units.in_seconds, units.in_bytes):
        with pytest.raises(ValueError, match="give"):
            read(math.nan)
    same = private.cost(fastbcd.MaskSet.full({"a": (9,)}), bandwidth="1Mbit", rtt="2ms")
    assert (same.bandwidth, same.rtt) == (1e6, 0.002)
