"""Decisions with a confidence: each takes the images that it needs.

Each step draws an order for itself. Images that are likely to change their answer, as their margins
in earlier steps say, have larger weights and are drawn sooner; evidence.py bounds differences
from such draws. Decisions are made at fixed numbers of images, so they depend on no engine, batch
size or number of ranks.

The chance of another choice than the exact one is at most error = 1 - confidence per step:
- hypothesis k passes or fails, wrongly with probability error / ((k+1)(k+2)) at most;
- if all K fail, they are compared with the leader, and the best one is eliminated by one of the
  K - 1 others with probability error / (K+1) at most;
- and 1/(1·2) + 1/(2·3) + ... + 1/(K(K+1)) + 1/(K+1) = 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastbcd.runtime.philox import PLACES, philox, uniform
from fastbcd.runtime.validate import check_number
from fastbcd.scoring.evidence import interval, log_evidence
from fastbcd.scoring.metric import Metric

# Images between two decisions, the largest of: LEAST, a part of all, a part of those seen.
LEAST = 128
LOOKS = 100
GROW = 16
STRATA = 4  # in which answers change with a chance of 1/4, 1/16, ...; and one where none does
WIDER = 1.5  # margins may change so many times as much as by the last choice, which is a good one
ROOM = 0.75  # of ADT: from a drop that is expected to ADT
MOST = 0.999  # of a stratum is expected to be visited


class Visits(NamedTuple):
    """In which order a step visits the images: each by its share of the weights that are left."""

    order: Tensor  # int64 [N]
    weights: np.ndarray  # float64 [N], in this order
    # float64 [N], ascending: an image of weight w is visited by t with the chance 1-e^(-wt).
    times: np.ndarray
    margins: Tensor  # [2, N] by image, see `visiting_order`


class Confident:
    """The decision of a step from the first images of a random order.

    An answer is the margin, which is positive where the hypothesis is right, and the loss.
    """

    to_the_end = False
    tie = 0.0

    def __init__(self, visits: Visits, *, adt: float, confidence: float) -> None:
        self.visits = visits
        self.order = visits.order
        # About how many images a hypothesis takes that passes clearly.
        self.needed = math.ceil(-np.expm1(-visits.weights).sum())
        self.error = 1.0 - confidence
        self.samples = len(visits.order)
        # A difference of so many answers is no pass.
        self.limit = _limit(adt, self.samples)
        # By number (-1: the base): [2, seen].
        self.answers: Any = defaultdict(lambda: np.zeros((2, 0)))
        self.left: list[int] = []  # in the comparison of those that fail

    def seen(self, k: int) -> int:
        """How many images it was run on; they are the first visits."""
        return self.answers[k].shape[1]

    def add(self, k: int, answers: Tensor) -> None:
        """Take the answers to further images, DoubleTensor[2, n]."""
        self.answers[k] = np.concatenate([self.answers[k], answers.numpy()], 1)

    def forget(self, k: int) -> None:
        """All answers of a hypothesis."""
        del self.answers[k]

    def until(self, numbers: list[int]) -> int:
        """The next look. Looks are at fixed numbers of images."""
        look = 0
        while look <= self.seen(numbers[0]):
            look += max(LEAST, self.samples // LOOKS, look // GROW)
        return min(look, self.samples)

    def verdict(self, k: int) -> bool | None:
        """Does it pass? None: that is not certain enough."""
        n = self.seen(k)
        if not n:
            return None
        error = self.error / ((k + 1) * (k + 2))
        return self.is_below(-1, k, n, self.limit, error)

    def is_below(
        self, one: int, other: int, n: int, limit: int, error: float
    ) -> bool | None:
        """After n visits: is D of the pair below the limit? None: not decided."""
        changes = self.changes(one, other, n)
        weights = self.visits.weights
        enough = -math.log(error)
        if log_evidence(changes, weights, limit) >= enough:
            return True
        if log_evidence(-changes, weights, 1 - limit) >= enough:
            return False
        return None

    def changes(self, one: int, other: int, n: int) -> np.ndarray:
        """[n]: 1 where only the first is right, -1 where only the other is."""
        first = self.answers[one][0, :n] > 0
        second = self.answers[other][0, :n] > 0
        return first.astype(np.int64) - second

    def contenders(self) -> list[int]:
        """One, or several of which those that have seen the fewest images must see more."""
        tried = sorted(k for k in self.answers if k >= 0)
        self.left = self.left or tried
        error = self.error / (len(tried) + 1) / max(len(tried) - 1, 1)
        while len(self.left) > 1:
            n = min(map(self.seen, self.left))
            leader = max(self.left, key=lambda k: self.totals(k, n)[0])
            # If D of the pair (leader, k) is not below 1, k has fewer correct answers.
            below = {k: self.is_below(leader, k, n, 1, error) for k in self.left}
            self.left = [k for k in self.left if below[k] is not False]
            if any(self.seen(k) == n for k in self.left):
                break
        return self.left

    def totals(self, k: int, n: int | None = None) -> tuple[float, float]:
        """Correct answers and summed loss on all images, estimated from the first n visits.

        Each visit stands for 1 / its chance to be one of the n. None: from all visits.
        """
        if n is None:
            n = self.seen(k)
        margins, losses = self.answers[k][:, :n]
        until = math.inf
        if n < self.samples:
            until = self.visits.times[n]
        images = -1 / np.expm1(-self.visits.weights[:n] * until)
        images *= self.samples / images.sum()
        return float((margins > 0) @ images), float(losses @ images)

    def drop(self, k: int) -> float:
        """In percentage points, estimated from the images that it has seen."""
        n = self.seen(k)  # the base has seen these images too
        return 100.0 * (self.totals(-1, n)[0] - self.totals(k)[0]) / self.samples

    def record(self, chosen: int) -> dict[str, Any]:
        """Further fields of a `Choice`: estimates, and what the next step needs."""
        changes = self.changes(-1, chosen, self.seen(chosen))
        low, high = interval(changes, self.visits.weights, self.error)
        return {
            "drops": {k: self.drop(k) for k in self.answers if k >= 0},
            "seen": {k: self.seen(k) for k in self.answers},
            "interval": (100.0 * low / self.samples, 100.0 * high / self.samples),
            "margins": new_margins(
                self.visits, self.answers[-1][0], self.answers[chosen][0]
            ),
        }


def visiting_order(
    total: int,
    margins: Tensor | None,
    *,
    adt: float,
    confidence: float,
    seed: int,
    step: int,
) -> Visits:
    """The visits of a step to all images, `total` of them.

    margins [2, N]: of each image its distance from another answer when it was last seen, and by
    how much the last hypothesis changed that; NaN where it is not known. All this was known before
    the hypotheses of this step, so that any use of it is allowed.
    """
    if margins is None:
        margins = torch.full((2, total), torch.nan)
    if margins.shape != (2, total):
        raise ValueError(
            f"margins have shape {list(margins.shape)} beside {total} images"
        )
    distance, change = margins.cpu()
    chances = np.zeros(total)
    for part in 0.25 ** np.arange(STRATA, 0, -1):
        # So many of the changes are larger. Nothing is below NaN.
        largest = WIDER * change.nanquantile(1 - part)
        chances[(distance < largest).numpy()] = part
    rates = _rates(chances, _limit(adt, total), 1 - confidence)
    weights = -np.log1p(-rates)
    # Of exponential times with rates w, the next is that of an image with its share of the w left.
    random = uniform(philox(PLACES, seed=seed, step=step), total)
    times = -np.log(random) / weights
    order = np.argsort(times, kind="stable")
    return Visits(torch.from_numpy(order), weights[order], times[order], margins)


def _rates(chances: np.ndarray, limit: int, error: float) -> np.ndarray:
    """The part of its like that a decision needs, for each image; chances: of another answer.

    The estimate of D has the variance V = Σ chance (1 - rate) / rate. A drop with a room of r
    answers is told from `limit` if V = r² / (2 log 1/error). Rates in proportion to √chance have
    this V with the fewest images. Where no change is expected, r losses must not be overlooked:
    (1 - rate)^r = error.
    """
    bar = math.log(2 / error)
    room = ROOM * max(limit, 1)
    roots = np.sqrt(chances)
    variance = room**2 / (2 * bar)
    rates = roots * (roots.sum() / (variance + chances.sum()))
    least = -math.expm1(-bar / room)
    return rates.clip(least).clip(max=MOST)


def new_margins(visits: Visits, base: np.ndarray, chosen: np.ndarray) -> Tensor:
    """The margins for the next step, in which the chosen hypothesis is the base.

    base, chosen: margins of the first visits, in their order.
    """
    order = visits.order
    distance = visits.margins[0].clone()
    change = torch.full_like(distance, torch.nan)
    for seen in (base, chosen):
        distance[order[: len(seen)]] = torch.from_numpy(abs(seen)).float()
    shared = min(len(base), len(chosen))
    changes = abs(chosen[:shared] - base[:shared])
    change[order[:shared]] = torch.from_numpy(changes).float()
    return torch.stack([distance, change])


def _limit(adt: float, total: int) -> int:
    """The least difference d, of -total to total + 1, with 100 d / total >= adt.

    >>> _limit(0.3, 10_000), _limit(0.301, 1000), _limit(math.inf, 5)
    (30, 4, 6)
    """
    differences = np.arange(-total, total + 2)
    place = np.searchsorted(100.0 * differences / total, adt)
    return int(differences[min(int(place), 2 * total + 1)])


def check_confidence(confidence: float | None, metric: Metric | None) -> None:
    """Refuse what is no probability, and metrics whose values are not 0 or 1.

    >>> check_confidence(99.9, None)
    Traceback (most recent call last):
    ValueError: confidence=99.9; it must be above 0 and below 1, such as 0.999, or None: exact
    """
    if confidence is None:
        return
    check_number("confidence", confidence)
    if not 0 < confidence < 1:
        way_out = "it must be above 0 and below 1, such as 0.999, or None: exact"
        raise ValueError(f"confidence={confidence}; {way_out}")
    if metric is not None:
        name = getattr(metric, "__name__", type(metric).__name__)
        raise ValueError(
            f"confidence={confidence} bounds the accuracy, not metric={name}; leave one of them out"
        )
