"""Decisions with a confidence: wrong no more often than promised, and with fewer images."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import fastbcd
from fastbcd import Engine, choose
from fastbcd.scoring import confident
from fastbcd.scoring.confident import Confident, Visits, new_margins, visiting_order
from fastbcd.scoring.decision import Selection
from fastbcd.scoring.evidence import interval, log_evidence
from helpers.nets import images, make, thinned


def all_orders(weights: np.ndarray):
    """Every order of the images, and its probability."""
    for order in itertools.permutations(range(len(weights))):
        drawn = weights[list(order)]
        yield list(order), float(np.prod(drawn / drawn[::-1].cumsum()[::-1]))


@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (1, 5, 1, 2, 9), (1, 1, 1, 300, 300)])
def test_the_evidence_against_the_truth_is_1_on_average_and_seldom_large(weights) -> None:
    """All orders of all populations of 5 images, at every look."""
    w = np.array(weights, float)
    orders, chances = (np.array(a) for a in zip(*all_orders(w), strict=True))
    assert chances.sum() == pytest.approx(1.0)
    for x in itertools.combinations_with_replacement((-1, 0, 1), 5):
        for population in {x, x[::-1]}:
            values, most = np.array(population), np.zeros(len(orders))
            for n in range(1, 6):
                drawn = values[orders[:, :n]]
                found = np.exp(log_evidence(drawn, w[orders], values.sum()))
                assert chances @ found <= 1 + 1e-6
                # It is less only if all that is left may be gains: then it is given up.
                if n == 1 and (values >= 0).sum() > 1:
                    assert chances @ found == pytest.approx(1.0)
                most = np.maximum(most, found)
            for bar in (1.5, 2.0, 5.0, 20.0):
                assert chances[most >= bar].sum() <= 1 / bar


def test_the_evidence_grows_with_the_difference_and_knows_what_is_certain() -> None:
    rng, d = np.random.default_rng(0), np.arange(-61, 62)
    weights = rng.choice([1.0, 2.0, 70.0], 60)
    for n in (1, 7, 30, 59, 60):
        x = rng.choice([-1, 0, 0, 0, 1], n)
        found = log_evidence(x, weights, d)
        finite = np.isfinite(found)
        assert (np.diff(found[finite]) > -1e-9).all()
        ahead, now = 60 - n, x.sum()
        assert (np.isposinf(found) == (d > now + ahead)).all()
        assert (np.isneginf(found) == ((d <= now - ahead) & (d <= now + ahead))).all()
        # Several at once are as one by one.
        both = log_evidence(np.stack([x, -x]), weights, [3, 4])
        assert both.tolist() == [log_evidence(x, weights, 3), log_evidence(-x, weights, 4)]


def test_the_interval_is_what_is_not_excluded() -> None:
    rng = np.random.default_rng(1)
    for n, total in ((1, 50), (40, 120), (100, 300), (9, 9)):
        x, weights = rng.choice([-1, 0, 0, 0, 1], n), rng.choice([1.0, 3.0], total)
        d = np.arange(-total, total + 1)
        less, more = log_evidence(x, weights, d), log_evidence(-x, weights, -d)
        inside = d[(less < math.log(200)) & (more < math.log(200))]
        assert interval(x, weights, 0.01) == (inside.min(), inside.max())
    # On paper, one look, nothing changed: (1 - n/N)^d < error.
    n, error = 2061, 0.001
    assert (1 - n / 10_000) ** 30 == pytest.approx(error, rel=0.05)
    evidence = [log_evidence(np.zeros(int(n * more)), np.ones(10_000), 30) for more in (1, 1.2)]
    assert evidence[0] < -math.log(error) < evidence[1]


def steps(kind: str, total: int, limit: int, count: int, rng: np.random.Generator):
    """Margins of the base and of three hypotheses for each of `count` steps, [4, N], and weights.

    Most drops are at the limit or one image off: nothing is harder to decide.
    """
    for _ in range(count):
        size = np.abs(rng.normal(size=total)) + 1e-3
        base = np.where(rng.random(total) < 0.9, size, -size)
        likely = size < np.quantile(size, 0.1)
        weights = np.ones(total) if kind == "uniform" else np.where(likely, 20.0, 1.0)
        if kind == "strata":
            weights = 2.0 ** rng.integers(0, 7, total)
        # rare: no image that is expected to change does; misleading: those that do all gain.
        losing = np.flatnonzero((base > 0) & ~(likely & (kind in ("rare", "misleading"))))
        gaining = np.flatnonzero((base < 0) & (likely | (kind != "misleading")))
        rows = [base]
        for _ in range(3):
            row, gains = base.copy(), int(rng.integers(0, min(8, len(gaining) + 1)))
            losses = limit + gains + int(rng.choice([-1, 0, 1, 5 * limit]))
            row[rng.choice(losing, losses, replace=False)] *= -1
            row[rng.choice(gaining, gains, replace=False)] *= -1
            rows.append(row)
        yield np.stack(rows), weights


def decided(rows: np.ndarray, weights: np.ndarray, rng, **settings) -> tuple[int, Confident]:
    """The number that is accepted, or -1 - the number of the best; and the decision."""
    times = rng.exponential(size=len(weights)) / weights
    order = times.argsort()

    def visit(numbers, begin, end):
        part = rows[:, order[begin:end]]
        rows_of = {k: np.stack([part[k + 1], np.zeros(end - begin)]) for k in numbers}
        return {k: torch.from_numpy(answers) for k, answers in rows_of.items()}

    visits = Visits(torch.from_numpy(order), weights[order], times[order], torch.zeros(0))
    decision = Confident(visits, **settings)
    number, accepted = Selection(visit, decision).choose([[0], [1, 2]])
    return number if accepted else -1 - number, decision


@pytest.mark.parametrize("ratio", [1, 10], ids=["equal", "unequal"])
@pytest.mark.parametrize("gains", [0, 3, 40])
@pytest.mark.parametrize("excess", [0, -1])
def test_a_bound_fails_no_more_often_than_promised(gains, excess, ratio) -> None:
    """2,000 populations at ADT (or one image better), looked at after every 20 images.

    D is excluded at some look with a probability of 20 % at most on each side; with few flips the
    bound is nearly tight, so that it must fail sometimes. Losses have the small weights.
    """
    total, limit, trials, error = 300, 6, 2000, 0.2
    truth = limit + excess
    rng = np.random.default_rng([gains, -excess, ratio])
    flips = np.zeros(total, np.int64)
    flips[: truth + gains], flips[total - gains :] = 1, -1
    weights = np.where(np.arange(total) < total // 2, 1.0, ratio)
    order = (rng.exponential(size=(trials, total)) / weights).argsort(1)
    x, w = flips[order], weights[order]
    low, high = np.zeros(trials, bool), np.zeros(trials, bool)
    for n in range(20, total + 1, 20):
        high |= log_evidence(x[:, :n], w, truth) >= -math.log(error)
        low |= log_evidence(-x[:, :n], w, -truth) >= -math.log(error)
    assert 0 < high.mean() <= error
    assert low.mean() <= error


@pytest.mark.parametrize("kind", ["uniform", "strata", "likely", "rare", "misleading"])
def test_a_step_errs_no_more_often_than_promised(kind, monkeypatch) -> None:
    """Whole steps, most decisions at ADT to within one image, at a promise of 30 %."""
    monkeypatch.setattr(confident, "LEAST", 20)
    total, limit, promise, count = 300, 6, 0.3, 250
    rng, wrong, early = np.random.default_rng(len(kind)), 0, 0
    for rows, weights in steps(kind, total, limit, count, rng):
        found, search = decided(rows, weights, rng, adt=2.0, confidence=1 - promise)
        right = (rows > 0).sum(1)
        passing = [k for k in range(3) if right[0] - right[k + 1] < limit]
        if passing:
            wrong += found != passing[0]
        else:  # of equal ones, the smaller loss would decide
            wrong += found >= 0 or right[-found] < right[1:].max()
        early += min(search.seen(k) for k in search.answers) < total
    assert wrong / count <= promise
    assert early > count / 4, "many are decided early, or the test would not say much"


def search_of(rows: np.ndarray, order: np.ndarray, adt: float, promise: float) -> Selection:
    """Of hypotheses with these margins [1 + K, N], the base's first; all images weigh the same."""

    def visit(numbers, begin, end):
        parts = {k: rows[k + 1, order[begin:end]] for k in numbers}
        return {k: torch.from_numpy(np.stack([part, abs(part)])) for k, part in parts.items()}

    total = len(order)
    visits = Visits(
        torch.from_numpy(order), np.ones(total), np.arange(1.0, total + 1), torch.zeros(0)
    )
    return Selection(visit, Confident(visits, adt=adt, confidence=1 - promise))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_errors_of_a_step_add_up_to_what_was_promised(count, monkeypatch) -> None:
    """Of a pass or a fail of each hypothesis, and of each comparison of the best with another."""
    monkeypatch.setattr(confident, "LEAST", 10)
    spent, plain = {}, Confident.is_below

    def is_below(self, one, other, n, limit, error):
        spent.setdefault((one, other), set()).add(error)
        return plain(self, one, other, n, limit, error)

    monkeypatch.setattr(Confident, "is_below", is_below)
    rows = np.ones((1 + count, 200))
    rows[1:, :50] = -1
    search_of(rows, np.random.default_rng(0).permutation(200), 2.0, 0.3).choose([[*range(count)]])
    assert all(len(errors) == 1 for errors in spent.values()), "the same at every look"
    verdicts = sum(max(spent[-1, k]) for k in range(count))
    compared = {max(errors) for (one, _), errors in spent.items() if one >= 0}
    total = verdicts + (count - 1) * max(compared, default=0.3 / 2)
    assert total == pytest.approx(0.3 if count > 1 else 0.15)


def test_twice_the_errors_would_be_seen(monkeypatch) -> None:
    """Five hypotheses that fail by one image: one is accepted in about half of the promised 20 %.

    Half, as half of the capital is on one bet. With twice the error it is more than 20 %.
    """
    monkeypatch.setattr(confident, "LEAST", 10)
    rng, wrong, count = np.random.default_rng(0), 0, 800
    for _ in range(count):
        rows = np.ones((6, 100))
        for row in rows[1:]:
            row[rng.choice(100, 3, replace=False)] = -1
        search = search_of(rows, rng.permutation(100), 3.0, 0.2)
        wrong += search.choose([k] for k in range(5))[1]
    assert 0.05 < wrong / count < 0.15


def test_an_answer_with_a_margin_of_0_is_wrong() -> None:
    """Of two equal logits, the other one is the answer."""
    rows = np.ones((3, 50))
    rows[:2, :5], rows[1, 5:25], rows[2, :5] = 0, 0, -1
    search = search_of(rows, np.arange(50), 10.0, 0.01)
    assert search.choose([[0, 1]]) == (1, True)
    assert search.decision.drop(0) == pytest.approx(40.0)
    net, (x, labels) = make("mlp"), images(30)
    with torch.no_grad():
        list(net.modules())[-1].weight.zero_()
        list(net.modules())[-1].bias.zero_()
    one = [fastbcd.masks(net).bits.nonzero()[0]]
    expected = pytest.approx((labels == 0).double().mean().item())
    for confidence in (None, 0.9):
        assert choose(net, one, (x, labels), adt=1.0, confidence=confidence).value == expected


def test_estimates_have_no_bias() -> None:
    """Of accuracy and loss from unequal weights, on average over many orders."""
    rng, total = np.random.default_rng(0), 400
    weights = np.where(np.arange(total) < 100, 5.0, 1.0)
    rows = np.stack([np.where(np.arange(total) < 60, -1.0, 1.0)] * 2)
    found = []
    for _ in range(400):
        times = rng.exponential(size=total) / weights
        order = times.argsort()
        visits = Visits(torch.from_numpy(order), weights[order], times[order], torch.zeros(0))
        decision = Confident(visits, adt=1.0, confidence=0.9)
        for k in (-1, 0):
            decision.add(k, torch.from_numpy(np.stack([rows[0], abs(rows[0])])[:, order[:150]]))
        found.append(decision.totals(0))
        assert decision.drop(0) == 0
    correct, losses = np.mean(found, axis=0)
    assert correct == pytest.approx(340, abs=2)
    assert losses == pytest.approx(400)


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


def order_of(data, margins=None, *, adt=1.0, step=0):
    return visiting_order(len(data), margins, adt=adt, confidence=0.999, seed=3, step=step)


def blank(n: int) -> fastbcd.ImageData:
    return fastbcd.ImageData.from_arrays(torch.zeros(n, 1, 2, 2), torch.zeros(n, dtype=torch.long))


def test_the_order_is_random_and_the_same_again() -> None:
    data = blank(50)
    visits = order_of(data, step=1)
    assert len(set(visits.weights)) == 1
    assert visits.margins.isnan().all()
    assert sorted(visits.order.tolist()) == list(range(50))
    again, other = (order_of(data, step=step).order for step in (1, 2))
    assert torch.equal(visits.order, again)
    assert not torch.equal(visits.order, other)
    # Two images that are the same are drawn on their own.
    twice = order_of(data.subset([0] * 50), step=1)
    assert torch.equal(twice.order, visits.order)
    # What was seen is known in the next step.
    base = np.arange(10.0)
    margins = new_margins(visits, -base, base + 0.5)
    assert margins[0].isfinite().sum() == margins[1].isfinite().sum() == 10
    seen = visits.order[:10]
    assert margins[0, seen].tolist() == (base + 0.5).tolist()
    assert margins[1, seen].tolist() == (2 * base + 0.5).tolist()


def test_images_that_may_change_are_visited_sooner_and_by_their_weights() -> None:
    n = 4000
    data, distance = blank(n), torch.linspace(0, 10, n)
    change = torch.linspace(0, 1, n)[torch.randperm(n)]
    visits = order_of(data, torch.stack([distance, change]))
    by_image = np.empty(n)
    by_image[visits.order.numpy()] = visits.weights
    assert (np.diff(by_image) <= 0).all(), "nearer to another answer, larger weight"
    assert 2 < len(set(by_image)) <= confident.STRATA + 1
    # Changes of 1 at most were seen, and 1.5 at most are expected.
    assert by_image[n // 5 :].max() == by_image.min()
    assert (visits.order.numpy()[:200] < n // 5).mean() > 0.4
    # A decision needs fewer images if ADT allows more losses.
    needed = [
        Confident(order_of(data, visits.margins, adt=adt), adt=adt, confidence=0.999).needed
        for adt in (0.0, 0.5, 5.0)
    ]
    assert n >= needed[0] > 0.99 * n > needed[1] > needed[2] > 10
    # The first visit, over many steps, goes to each image by its share of the weights.
    data, margins = blank(1000), torch.tensor([[0.1] * 200 + [9.0] * 800, [1.0] * 1000])
    first = [order_of(data, margins, adt=2.0, step=step) for step in range(1000)]
    weights = np.sort(first[0].weights)[::-1]
    assert weights[0] > 2 * weights[-1]
    share = np.mean([int(v.order[0]) < 200 for v in first])
    assert share == pytest.approx(weights[:200].sum() / weights.sum(), abs=0.05)


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
        assert found.value == pytest.approx(exact.value)
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
