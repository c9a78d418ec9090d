"""Decisions with a confidence: wrong no more often than promised, and with fewer images."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import fastbcd
from fastbcd import Engine, choose
from fastbcd.scoring import sampled
from fastbcd.scoring.confidence import PRIORS, interval, log_evidence
from fastbcd.scoring.sampled import Sampled, expected_visits, new_margins, visiting_order
from helpers.nets import images, make, thinned


def probability(lost: int, gained: int, seen: int, total: int, losses: int, gains: int) -> float:
    """Of one sequence, drawn without replacement, in exact arithmetic."""
    counts = (lost, losses), (gained, gains), (seen - lost - gained, total - losses - gains)
    if any(k < n for n, k in counts):
        return 0.0
    ways = math.prod(math.perm(k, n) for n, k in counts)
    return ways / math.perm(total, seen)


def urns(lost: int, gained: int, others: int) -> float:
    """M, draw by draw: a colour is drawn by its share of the balls, and gets one more."""
    total = 0.0
    for b, weight in PRIORS.items():
        balls, p = {"lost": 0.5, "gained": 0.5, "others": b}, weight
        for colour in ["lost"] * lost + ["gained"] * gained + ["others"] * others:
            p *= balls[colour] / sum(balls.values())
            balls[colour] += 1
        total += p
    return total


@pytest.mark.parametrize("seen", [0, 1, 3, 6, 7])
def test_the_evidence_is_a_ratio_of_probabilities(seen) -> None:
    """At most M / P for every composition, close to it, convex, and infinite where impossible."""
    total, all_of_m = 7, 0.0
    d = np.arange(-total, total + 1)
    for lost, gained in itertools.product(range(seen + 1), repeat=2):
        others = seen - lost - gained
        if others < 0:
            continue
        m = urns(lost, gained, others)
        all_of_m += m * math.factorial(seen) / math.prod(
            map(math.factorial, (lost, gained, others)))  # fmt: skip
        best = np.zeros(len(d))
        for k, g in itertools.product(range(total + 1), repeat=2):
            if k + g <= total:
                p = probability(lost, gained, seen, total, k, g)
                best[k - g + total] = max(best[k - g + total], p)
        found = log_evidence(lost, gained, seen, total, d)
        possible = abs(d - (lost - gained)) <= total - seen
        assert (np.isinf(found) == ~possible).all()
        assert (np.diff(found[possible], 2) > -1e-9).all()
        ratio = math.log(m) - np.log(best[best > 0])
        assert (found[best > 0] <= ratio + 1e-9).all()
        assert (found[best > 0] >= ratio - 1.5).all()
        if seen == total:
            assert found[best > 0] == pytest.approx(ratio)
    assert all_of_m == pytest.approx(1.0)


def test_the_interval_is_what_is_not_excluded() -> None:
    for lost, gained, seen, total in (
        (0, 0, 0, 50),
        (3, 1, 40, 120),
        (0, 0, 100, 300),
        (5, 5, 9, 9),
    ):
        low, high = interval(lost, gained, seen, total, 0.01)
        d = np.arange(-total, total + 1)
        inside = d[log_evidence(lost, gained, seen, total, d) < math.log(100)]
        assert (low, high) == (inside.min(), inside.max())
    # On paper, one look, nothing changed: (1 - n/N)^d < error.
    n, error = 2061, 0.001
    assert (1 - n / 10_000) ** 30 == pytest.approx(error, rel=0.05)
    evidence = [log_evidence(0, 0, int(n * more), 10_000, 30) for more in (1.0, 1.15)]
    assert evidence[0] < -math.log(error) < evidence[1]


def steps(kind: str, total: int, limit: int, count: int, rng: np.random.Generator):
    """Margins of the base and of three hypotheses for each of `count` steps, [4, N], and which
    images are first. Most drops are at the limit or one image off: nothing is harder to decide.
    """
    for _ in range(count):
        size = np.abs(rng.normal(size=total)) + 1e-3
        base = np.where(rng.random(total) < 0.9, size, -size)
        first = np.zeros(total, bool) if kind == "uniform" else size < np.quantile(size, 0.1)
        # rare: no image that is expected to change does; misleading: those that do all gain.
        losing = np.flatnonzero((base > 0) & ~(first & (kind in ("rare", "misleading"))))
        gaining = np.flatnonzero((base < 0) & (first | (kind != "misleading")))
        rows = [base]
        for _ in range(3):
            row, gains = base.copy(), int(rng.integers(0, min(8, len(gaining) + 1)))
            losses = limit + gains + int(rng.choice([-1, 0, 1, 5 * limit]))
            row[rng.choice(losing, losses, replace=False)] *= -1
            row[rng.choice(gaining, gains, replace=False)] *= -1
            rows.append(row)
        yield np.stack(rows), first


def decided(rows: np.ndarray, first: np.ndarray, rng, **settings: float) -> tuple[int, Sampled]:
    """The number that is accepted, or -1 - the number of the best; and the search."""
    order = rng.permutation(rows.shape[1])
    order = np.concatenate([order[first[order]], order[~first[order]]])

    def visit(numbers, begin, end):
        part = rows[:, order[begin:end]]
        return {k: np.stack([part[k + 1], np.zeros(end - begin)]) for k in numbers}

    search = Sampled(visit, len(order), int(first.sum()), **settings)
    for wave in ([0], [1, 2]):
        if (number := search.wave(wave)) is not None:
            return number, search
    left = {k: search.estimate(k)[0] for k in search.best()}
    return -1 - max(left, key=left.__getitem__), search


@pytest.mark.parametrize("gains", [0, 3, 40])
@pytest.mark.parametrize("excess", [0, -1])
def test_a_bound_fails_no_more_often_than_promised(gains, excess) -> None:
    """2,000 populations at ADT (or one image better), looked at after every image.

    D is excluded at some look with a probability of 20 % at most; with few flips the bound is
    nearly tight, so that it must fail sometimes.
    """
    total, limit, trials, error = 300, 6, 2000, 0.2
    truth = limit + excess
    rng = np.random.default_rng([gains, -excess])
    flips = np.zeros((trials, total), np.int64)
    flips[:, : truth + gains], flips[:, truth + gains : truth + 2 * gains] = 1, -1
    flips = rng.permuted(flips, axis=1)
    losses, gained = (np.cumsum(flips == sign, 1) for sign in (1, -1))
    excluded = np.zeros(trials, bool)
    for n in range(1, total + 1):
        found = log_evidence(losses[:, n - 1], gained[:, n - 1], n, total, truth)
        excluded |= found >= -math.log(error)
    assert 0 < excluded.mean() <= error


@pytest.mark.parametrize("kind", ["uniform", "likely", "rare", "misleading"])
def test_a_step_errs_no_more_often_than_promised(kind, monkeypatch) -> None:
    """Whole steps, most decisions at ADT to within one image, at a promise of 30 %."""
    monkeypatch.setattr(sampled, "LEAST", 20)
    total, limit, promise, count = 300, 6, 0.3, 50
    rng, wrong, early = np.random.default_rng(len(kind)), 0, 0
    for rows, first in steps(kind, total, limit, count, rng):
        found, search = decided(rows, first, rng, adt=2.0, confidence=1 - promise)
        right = (rows > 0).sum(1)
        passing = [k for k in range(3) if right[0] - right[k + 1] < limit]
        if passing:
            wrong += found != passing[0]
        else:  # of equal ones, the smaller loss would decide
            wrong += found >= 0 or right[-found] < right[1:].max()
        early += min(search.seen(k) for k in search.found) < total
    assert wrong / count <= promise
    assert early > count / 4, "many are decided early, or the test would not say much"


def net_and_data(n: int, seed: int = 0):
    """A net, and labels that it mostly gets right."""
    net, (x, labels) = thinned(make("mlp")), images(n, seed)
    with torch.no_grad():
        answers = net(x).argmax(1)
    return net, (x, torch.where(torch.arange(n) % 20 == 0, labels, answers))


def test_a_choice_takes_fewer_images_and_is_the_exact_one() -> None:
    net, data = net_and_data(2000)
    masks = fastbcd.masks(net)
    hypotheses = [masks.sample(1, seed=0, step=0, trial=t) for t in range(4)]
    margins = None
    for step, adt in enumerate((20.0, 20.0, 1.0, -20.0)):
        exact = choose(net, hypotheses, data, adt=adt)
        found = choose(net, hypotheses, data, adt=adt, confidence=0.999, step=step, margins=margins)
        margins = found.margins
        assert (found.number, found.accepted) == (exact.number, exact.accepted)
        assert found.images < exact.images
        low, high = found.interval
        assert low <= exact.drops[exact.number] <= high
        assert found.percent == pytest.approx(exact.percent, abs=5)
        assert found.loss == pytest.approx(exact.loss, rel=0.05)
        assert found.images == sum(found.seen[k] for k in range(found.tried))
    assert exact.seen is None


def test_a_choice_depends_on_no_engine_batch_size_or_wave() -> None:
    net, data = net_and_data(700)
    masks = fastbcd.masks(net)
    hypotheses = [masks.sample(1, seed=1, step=0, trial=t) for t in range(3)]
    found = [
        choose(net, hypotheses, data, adt=0.9, confidence=0.9, engine=Engine(name, batch_size=size))
        for name, size in (("sequential", 128), ("stacked", 7), ("collapsed", 50))
    ]
    assert len({(c.number, c.accepted, str(c.seen), c.interval) for c in found}) == 1
    assert torch.allclose(found[0].margins, found[1].margins, atol=1e-4, equal_nan=True)


def test_the_order_is_random_and_begins_with_what_may_change() -> None:
    data = fastbcd.ImageData.from_arrays(
        torch.zeros(50, 1, 2, 2), torch.zeros(50, dtype=torch.long)
    )
    visits = visiting_order(data, None, seed=3, step=1)
    order = visits.order
    assert visits.first == 0
    assert visits.margins.isnan().all()
    assert sorted(order.tolist()) == list(range(50))
    again, other = (visiting_order(data, None, seed=3, step=step).order for step in (1, 2))
    assert torch.equal(order, again)
    assert not torch.equal(order, other)
    # 10 images were seen: changes of about 1, and distances of 1 to 10.
    base = np.arange(10.0)
    margins = new_margins(visits, base, base + np.linspace(1, 0.9, 10))
    assert margins[0].isfinite().sum() == margins[1].isfinite().sum() == 10
    margins[1] *= 3
    after = visiting_order(data, margins, seed=3, step=2)
    assert after.first == 3
    assert set(after.order[:3].tolist()) == set(order[:3].tolist())
    rest = [i for i in other.tolist() if i not in order[:3].tolist()]
    assert after.order[3:].tolist() == rest
    # A decision needs the first images and some others: fewer if ADT allows more losses.
    needed = [expected_visits(after, adt, 0.999) for adt in (0.0, 20.0, 60.0)]
    assert 50 == needed[0] > needed[1] > needed[2] > 3


@pytest.mark.parametrize("adt", [-math.inf, 0.0, math.inf])
@pytest.mark.parametrize("n", [1, 3, 300])
def test_extreme_cases_are_those_of_the_exact_choice(n, adt) -> None:
    """Few images, any ADT, a hypothesis that removes nothing, a loss of one's own."""
    net, data = net_and_data(n)
    kept = fastbcd.masks(net).bits.nonzero().flatten()
    hypotheses = [kept, kept[:0], kept[:2], kept[:0]]

    def mean(outputs, targets):
        return -outputs.gather(1, targets[:, None]).mean()

    exact = choose(net, hypotheses, data, adt=adt, loss=mean)
    found = choose(net, hypotheses, data, adt=adt, loss=mean, confidence=0.9999)
    assert (found.number, found.accepted, found.tried) == (
        exact.number,
        exact.accepted,
        exact.tried,
    )
    if found.seen[found.number] == n:
        assert found.correct == exact.correct
        assert found.loss == pytest.approx(exact.loss)


def test_what_is_refused() -> None:
    net, data = net_and_data(5)
    one = [torch.tensor([int(fastbcd.masks(net).bits.nonzero()[0])])]

    def own(outputs, targets):
        return outputs.argmax(1) == targets

    for confidence, error, text in (
        (1.0, ValueError, "above 0 and below 1"), (True, TypeError, "a number"),
        (0.0, ValueError, "confidence=0.0"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            choose(net, one, data, adt=1.0, confidence=confidence)
    with pytest.raises(ValueError, match="not metric=own"):
        choose(net, one, data, adt=1.0, confidence=0.9, metric=own)
    with pytest.raises(ValueError, match=r"margins have shape \[3\]"):
        choose(net, one, data, adt=1.0, confidence=0.9, margins=torch.zeros(3))
