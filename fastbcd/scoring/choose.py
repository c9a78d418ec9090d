"""choose: the hypothesis that a step takes, scoring no more than the decision needs.

The rule (Algorithm 1): the lowest-numbered hypothesis whose accuracy drops by less than ADT
percentage points; if none does, the one that drops least, ties by smaller loss, then by number.
Losses count as equal within 1e-5, the rounding that engines and batch sizes may differ by.

What is certain is not computed. A hypothesis with c correct answers and n images ahead ends with c
to c + n. If c is enough, it is certain to pass, and later numbers do not matter. If c + n is not,
it is certain to fail: it is set aside, and continued only if no hypothesis passes and it can still
be the best. These are facts about counts, so the choice is that of the one-by-one loop. With a
confidence, what is certain enough is not computed either: see sampled.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.masking.convert import unwrap
from fastbcd.scoring.confidence import check_confidence
from fastbcd.scoring.engine import Engine, as_engine
from fastbcd.scoring.metric import Criterion, Loss, Metric
from fastbcd.scoring.plan import ScoringPlan
from fastbcd.scoring.sampled import Sampled, Visits, expected_visits, new_margins, visiting_order
from fastbcd.scoring.score import Tally, answers, check_removals, prepared, read, run_pass

ROUNDING = 1e-5  # by which engines and batch sizes may differ: closer losses are equal
SUM_ROUNDING = 1e-9  # by which the order of its terms may change a sum, relative to its size


@dataclass(frozen=True)
class Choice:
    """The hypothesis to take, and what the decision cost.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4), nn.Linear(4, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> choice = fastbcd.choose(net, [torch.tensor([2, 3])], data, adt=100.0)
    >>> choice.removal, choice.accepted, choice.tried
    (tensor([2, 3]), True, 1)
    """

    number: int
    removal: Tensor  # LongTensor[D]
    accepted: bool  # its drop is below ADT; otherwise the best of all
    tried: int  # hypotheses drawn from the source
    drops: dict[int, float]  # by number, of those that were scored on all images
    images: int  # hypothesis-images that were run, at most tried * samples
    correct: (
        int | None
    )  # of the chosen one; None with a metric of your own, and if not all were seen
    loss: float
    base_correct: int | None
    base_loss: float
    samples: int
    engine: str
    value: float  # mean of the metric, of the chosen hypothesis
    base_value: float
    percent: float  # the value in percent of the metric's range; as it is without bounds
    base_percent: float
    # With a confidence the numbers above are estimates, unless all images were seen, and `drops`
    # holds all hypotheses.
    seen: dict[int, int] | None = None  # by number (-1: the base): images that were needed
    interval: tuple[float, float] | None = None  # holds the drop, with the stated probability
    margins: Tensor | None = field(default=None, repr=False)  # for the next step


def choose(
    net: nn.Module, hypotheses: Iterable[Tensor], data: Any, *, adt: float,
    engine: str | Engine = "auto", metric: Metric | None = None, loss: Loss | None = None,
    early: bool = True, confidence: float | None = None, seed: int = 0, step: int = 0,
    margins: Tensor | None = None,
) -> Choice:  # fmt: skip
    """Take the first hypothesis with a drop below `adt` percentage points, else the best.

    With a metric that has no bounds, `adt` is in its units, and all images are always scored.

    Args:
        hypotheses: removals, LongTensor[D] each. They are drawn in waves of 1, 2, 4, ...
            `Engine.wave`, and none after one is accepted: if that is the first, it is the only
            one scored.
        early: stop scoring a hypothesis when its outcome is certain. Never changes the choice.
        engine, metric, loss: as in `score`. The engine never changes the choice.
        confidence: None is exact. With 0.999 the choice differs from the exact one with a
            probability of 0.1 % at most: images are visited in a random order, and a decision is
            made as soon as it is that certain (docs/confidence.md). For accuracy only.
        seed, step: determine the random order; each step needs one of its own.
        margins: `Choice.margins` of the step before, for the same data. Images that are likely to
            change their answer are visited sooner, so that fewer are needed.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> choose(net, [torch.tensor([0]), torch.tensor([1])], data, adt=100.0).number
    0
    """
    engine, criterion, net = as_engine(engine), Criterion(metric, loss), unwrap(net)
    check_confidence(confidence, metric)
    images, current = read(net, data)
    source = ((k, check_removals(current, [h], k)[0]) for k, h in enumerate(hypotheses))
    removals = dict(islice(source, 1))
    if not removals:
        raise ValueError("there is no hypothesis to choose from")
    some, visits, needed = [*removals.values()], None, None
    if confidence is not None:
        visits = visiting_order(
            images, margins, adt=adt, confidence=confidence, seed=seed, step=step
        )
        needed = expected_visits(visits)
    with prepared(net, current, some, images, engine, criterion, engine.wave, needed) as plan:
        search: _Search | _SampledSearch
        if visits is None:
            search = _Search(plan, criterion, images, adt, early)
        else:
            search = _SampledSearch(plan, criterion, images, visits)
            # The next step needs the base's margins of all images.
            search.begin(adt=adt, confidence=confidence, whole=margins is None)
        size = 1
        while removals:
            accepted = search.wave(removals)
            if accepted is not None:
                return search.choice(accepted, True)
            size = min(2 * size, engine.wave)
            removals = dict(islice(source, size))
        return search.choice(search.best(), False)


class _Search:
    """One step's search: the base's sums, and the sums of each hypothesis so far."""

    def __init__(
        self, plan: ScoringPlan, criterion: Criterion, data: ImageData, adt: float, early: bool
    ) -> None:
        self.plan, self.data, self.adt, self.criterion = plan, data, adt, criterion
        self.removals: dict[int, Tensor] = {}
        self.tallies: dict[int, Tally] = {}
        self.base, self.base_loss = run_pass(plan, criterion, data, {}).sums[-1]
        bounds = self.criterion.bounds
        self.early = early and bounds is not None
        self.low, self.high = bounds or (0.0, 0.0)
        # Counts are exact; other sums are equal up to the order of their terms, and engines differ.
        own = criterion.metric is not None
        size = max(abs(self.low), abs(self.high), abs(self.base) / len(data)) * len(data)
        self.slack, self.tie = (SUM_ROUNDING * size, ROUNDING * size) if own else (0.0, 0.0)

    def drop(self, value: float) -> float:
        return self.criterion.points * (self.base - value) / len(self.data)

    def passes(self, value: float) -> bool:
        return self.drop(value - self.slack) < self.adt

    def wave(self, removals: dict[int, Tensor]) -> int | None:
        """Score some hypotheses; the number of the one to accept, or None."""
        self.removals.update(removals)
        alive, accepted = set(removals), None

        def decide(tally: Tally) -> tuple[set[int], float]:
            nonlocal alive, accepted
            self.tallies.update({k: tally.part([k]) for k in alive})
            ahead = len(self.data) - tally.seen
            if ahead and not self.early:
                return alive, ahead
            slack = self.slack if ahead else 0.0
            least = {k: tally.sums[k][0] + self.low * ahead - slack for k in alive}
            most = {k: tally.sums[k][0] + self.high * ahead + slack for k in alive}
            sure = [k for k in alive if self.passes(least[k])]
            lost = {k for k in alive if not self.passes(most[k])}
            if sure and lost >= {k for k in alive if k < min(sure)}:
                # It is decided; only its own numbers are still needed.
                accepted = min(sure)
                alive = {accepted}
            else:
                alive = {k for k in alive - lost if not sure or k <= min(sure)}
            open_ = alive - {accepted, *sure}
            wait = min((self.wait(k, tally, least[k], most[k]) for k in open_), default=ahead)
            return alive if ahead else set(), wait

        run_pass(self.plan, self.criterion, self.data, removals, decide, base=False)
        return accepted

    def wait(self, k: int, tally: Tally, least: float, most: float) -> float:
        """How many images to see before the sum of an open hypothesis is worth a look.

        An image moves each bound by 1 / len(data) of the range at most, so nothing is decided
        before. Then half of the way to a decision at the present rate, if that is a small part of
        what was seen: a look waits for a GPU.
        """
        points = (self.drop(least - self.slack) - self.adt, self.adt - self.drop(most - self.slack))
        images = [p * len(self.data) / 100.0 for p in points]
        rate = self.criterion.percent(tally.sums[k][0], tally.seen) / 100.0  # of the upper bound
        likely = min(n / max(r, 1e-9) for n, r in zip(images, (rate, 1.0 - rate), strict=True))
        return max(min(images) - 1.0, min(likely / 2, tally.seen / 4))

    def best(self) -> int:
        """The fallback: the largest metric, then the smaller loss, then the lower number.

        Those that were set aside are scored to the end, except those that cannot be the best.
        """
        samples, tallies = len(self.data), self.tallies
        while True:
            ahead = {k: samples - t.seen for k, t in tallies.items()}
            # One hypothesis is certain to end with at least this much.
            floor = max(t.sums[k][0] + self.low * ahead[k] for k, t in tallies.items())
            floor -= self.tie + self.slack
            left = {k: t for k, t in tallies.items()
                    if ahead[k] and t.sums[k][0] + self.high * ahead[k] >= floor}  # fmt: skip
            if not left:
                break
            # Those that stopped after the same image are continued together.
            begun = min(left.values(), key=lambda t: t.seen)
            group = [k for k, t in left.items() if t.seen == begun.seen]
            begun = replace(begun, sums={k: left[k].sums[k] for k in group})
            removals = {k: self.removals[k] for k in group}
            tally = run_pass(
                self.plan, self.criterion, self.data, removals, base=False, begun=begun
            )
            tallies.update({k: tally.part([k]) for k in group})
        done = {k: t.sums[k] for k, t in sorted(tallies.items()) if t.seen == samples}
        return _best_of(done, samples, self.tie)

    def choice(self, number: int, accepted: bool) -> Choice:
        samples, tallies, percent = len(self.data), self.tallies, self.criterion.percent
        drops = {k: self.drop(t.sums[k][0]) for k, t in tallies.items() if t.seen == samples}
        value, loss = tallies[number].sums[number]
        own = self.criterion.metric is not None
        return Choice(
            number, self.removals[number], accepted, len(self.removals), drops,
            sum(t.seen for t in tallies.values()), None if own else int(value), loss / samples,
            None if own else int(self.base), self.base_loss / samples, samples,
            self.plan.engine.name, value / samples, self.base / samples, percent(value, samples),
            percent(self.base, samples),
        )  # fmt: skip


class _SampledSearch:
    """One step's search with a confidence: runs the hypotheses for `Sampled`, which decides."""

    def __init__(
        self, plan: ScoringPlan, criterion: Criterion, data: ImageData, visits: Visits
    ) -> None:
        self.plan, self.criterion, self.data, self.visits = plan, criterion, data, visits
        self.removals: dict[int, Tensor] = {}

    def begin(self, **settings: Any) -> None:
        """settings: of `Sampled`."""
        self.sampled = Sampled(self.visit, self.visits, **settings)

    def visit(self, numbers: list[int], begin: int, end: int) -> dict[int, np.ndarray]:
        removals = {k: self.removals[k] for k in numbers if k >= 0}
        order = self.visits.order[begin:end]
        found = answers(
            self.plan,
            self.criterion,
            self.data.subset(order),
            removals,
            base=-1 in numbers,
            images=order.cpu(),
        )  # fmt: skip
        return {k: t.numpy() for k, t in found.items()}

    def wave(self, removals: dict[int, Tensor]) -> int | None:
        self.removals.update(removals)
        return self.sampled.wave(removals)

    def best(self) -> int:
        done = {k: self.sampled.estimate(k) for k in self.sampled.best()}
        return _best_of(done, len(self.data), 0.0)

    def choice(self, number: int, accepted: bool) -> Choice:
        s, n, percent = self.sampled, len(self.data), self.criterion.percent
        (value, loss), (base, base_loss) = s.estimate(number), s.estimate(-1)
        seen = {k: s.seen(k) for k in s.found}
        return Choice(
            number, self.removals[number], accepted, len(self.removals),
            {k: s.drop(k) for k in seen if k >= 0}, sum(seen.values()) - seen[-1],
            round(value) if seen[number] == n else None, loss / n,
            round(base) if seen[-1] == n else None, base_loss / n, n, self.plan.engine.name,
            value / n, base / n, percent(value, n), percent(base, n), seen, s.interval(number),
            new_margins(self.visits, s.found[-1][0], s.found[number][0]),
        )  # fmt: skip


def _best_of(done: dict[int, tuple[float, float]], samples: int, tie: float) -> int:
    """The largest metric, up to `tie`, then the smaller loss, then the lower number."""
    most = max(value for value, _ in done.values())
    best, *rest = (k for k, (value, _) in done.items() if value >= most - tie)
    for k in rest:
        if fewer(done[k][1] / samples, done[best][1] / samples):
            best = k
    return best


def fewer(one: float, other: float) -> bool:
    """Is a loss smaller than another by more than rounding?

    >>> fewer(1.0, 1.1), fewer(1.0, 1.0 + 1e-9)
    (True, False)
    """
    return one < other - ROUNDING * max(1.0, other)
