"""The search of a step with a confidence: each decision takes the images that it needs.

Each step draws an order for itself. Images that are likely to change their answer, as their margins
in earlier steps say, have larger weights and are drawn sooner; confidence.py bounds differences
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
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastbcd.data.images import ImageData
from fastbcd.scoring.confidence import interval, log_evidence

# Images between two decisions, the largest of: LEAST, a part of all, a part of those seen.
LEAST, LOOKS, GROW = 128, 100, 16
STRATA = 4  # in which answers change with a chance of 1/4, 1/16, ...; and one where none does
WIDER = 1.5  # margins may change so many times as much as by the last choice, which is a good one
ROOM = 0.75  # of ADT: from a drop that is expected to ADT
MOST = 0.999  # of a stratum is expected to be visited


# (numbers, begin, end) -> by number (-1: the base): margins and losses of these visits, [2, n].
# The margin is the logit of the label minus the largest other one: negative if the answer is wrong.
Visit = Callable[[list[int], int, int], dict[int, np.ndarray]]


class Visits(NamedTuple):
    """In which order a step visits the images: each by its share of the weights that are left."""

    order: Tensor  # int64 [N]
    weights: np.ndarray  # float64 [N], in this order
    times: np.ndarray  # float64 [N], ascending: an image of weight w is visited by t with 1-e^(-wt)
    margins: Tensor  # [2, N] by image, see `visiting_order`


class Sampled:
    """One step's search: who answers what so far, and what is decided.

    visit: runs hypotheses on the images of a range of visits. whole: run the base on all images at
    once.
    """

    def __init__(
        self, visit: Visit, visits: Visits, *, adt: float, confidence: float, whole: bool = False
    ) -> None:
        self.visit, self.visits, self.error = visit, visits, 1.0 - confidence
        self.total = total = len(visits.order)
        # A difference of `limit` or more answers is no pass.
        self.limit = _limit(adt, total)
        self.looks = [0]
        while (n := self.looks[-1]) < total:
            self.looks.append(min(n + max(LEAST, total // LOOKS, n // GROW), total))
        # By number: [2, seen].
        self.found = visit([-1], 0, total) if whole else {-1: np.zeros((2, 0))}

    def seen(self, k: int) -> int:
        """How many images a hypothesis was run on."""
        return self.found[k].shape[1]

    def proceed(self, numbers: list[int]) -> int:
        """Run hypotheses that have seen the same images up to the next look; its place."""
        begin = self.seen(numbers[0])
        look = next(n for n in self.looks if n > begin)
        wanted = [-1, *numbers] if self.seen(-1) < look else numbers
        for k, new in self.visit(wanted, begin, look).items():
            self.found[k] = np.concatenate([self.found[k], new], 1)
        return look

    def wave(self, numbers: Iterable[int]) -> int | None:
        """Decide about hypotheses in parallel; the number of the one to accept, or None."""
        alive = sorted(numbers)
        self.found.update({k: np.zeros((2, 0)) for k in alive})
        passed: int | None = None
        while alive:
            look = self.proceed(alive)
            for k in list(alive):
                verdict = self.verdict(k, look)
                if verdict is not None:
                    alive.remove(k)
                if verdict:
                    passed, alive = k, [j for j in alive if j < k]
                    break
        return passed

    def verdict(self, k: int, look: int) -> bool | None:
        """Does the hypothesis pass? None: not decided."""
        return self.is_below(-1, k, look, self.limit, self.error / ((k + 1) * (k + 2)))

    def is_below(self, one: int, other: int, n: int, limit: int, error: float) -> bool | None:
        """After n visits: is D of the pair below the limit? None: not decided."""
        changes, weights = self.changes(one, other, n), self.visits.weights
        if log_evidence(changes, weights, limit) >= -math.log(error):
            return True
        return False if log_evidence(-changes, weights, 1 - limit) >= -math.log(error) else None

    def changes(self, one: int, other: int, n: int) -> np.ndarray:
        """[n]: 1 where only the first is right, -1 where only the other is."""
        a, b = (self.found[k][0, :n] > 0 for k in (one, other))
        return a.astype(np.int64) - b

    def best(self) -> list[int]:
        """If none passes: those that may be the best, one, or several that saw all images."""
        left = sorted(k for k in self.found if k >= 0)
        error = self.error / (len(left) + 1) / max(len(left) - 1, 1)
        while len(left) > 1:
            n = min(self.seen(k) for k in left)
            leader = max(left, key=lambda k: self.estimate(k, n)[0])
            # If D of the pair (leader, k) is not below 1, k has fewer correct answers.
            behind = {k: self.is_below(leader, k, n, 1, error) for k in left if k != leader}
            left = [k for k in left if behind.get(k) is not False]
            if n == self.total:
                break
            if last := [k for k in left if self.seen(k) == n]:
                self.proceed(last)
        return sorted(left)

    # ------------------------------------------------------------------ what is reported

    def estimate(self, k: int, n: int | None = None) -> tuple[float, float]:
        """Correct answers and summed loss on all images, estimated from the first n visits.

        Each visit stands for 1 / its chance to be one of the n. None: from all visits.
        """
        n = self.seen(k) if n is None else n
        margins, losses = self.found[k][:, :n]
        until = self.visits.times[n] if n < self.total else math.inf
        images = -1 / np.expm1(-self.visits.weights[:n] * until)
        images *= self.total / images.sum()
        return float((margins > 0) @ images), float(losses @ images)

    def drop(self, k: int) -> float:
        """The drop in percentage points, estimated from the images that were seen."""
        n = self.seen(k)  # the base has seen these images too
        return 100.0 * (self.estimate(-1, n)[0] - self.estimate(k)[0]) / self.total

    def interval(self, k: int) -> tuple[float, float]:
        """Holds the exact drop in percentage points, with the probability `confidence`."""
        ends = interval(self.changes(-1, k, self.seen(k)), self.visits.weights, self.error)
        return 100.0 * ends[0] / self.total, 100.0 * ends[1] / self.total


def visiting_order(
    data: ImageData, margins: Tensor | None, *, adt: float, confidence: float, seed: int, step: int
) -> Visits:
    """The visits of a step.

    margins [2, N]: of each image its distance from another answer when it was last seen, and by
    how much the last hypothesis changed that; NaN where it is not known. All this was known before
    the hypotheses of this step, so that any use of it is allowed.
    """
    if margins is None:
        margins = torch.full((2, len(data)), torch.nan)
    elif margins.shape != (2, len(data)):
        raise ValueError(f"margins have shape {list(margins.shape)} beside {len(data)} images")
    distance, change = margins.cpu()
    chances = np.zeros(len(data))
    for part in 0.25 ** np.arange(STRATA, 0, -1):
        # So many of the changes are larger. Nothing is below NaN.
        chances[(distance < WIDER * change.nanquantile(1 - part)).numpy()] = part
    weights = -np.log1p(-_rates(chances, _limit(adt, len(data)), 1 - confidence))
    # Of exponential times with rates w, the next is that of an image with its share of the w left.
    times = -np.log(data.uniform(seed=seed, step=step)) / weights
    order = np.argsort(times, kind="stable")
    return Visits(torch.from_numpy(order).to(data.device), weights[order], times[order], margins)


def _rates(chances: np.ndarray, limit: int, error: float) -> np.ndarray:
    """The part of its like that a decision needs, for each image; chances: of another answer.

    The estimate of D has the variance V = Σ chance (1 - rate) / rate. A drop with a room of r
    answers is told from `limit` if V = r² / (2 log 1/error). Rates in proportion to √chance have
    this V with the fewest images. Where no change is expected, r losses must not be overlooked:
    (1 - rate)^r = error.
    """
    bar, room, roots = math.log(2 / error), ROOM * max(limit, 1), np.sqrt(chances)
    rates = roots * (roots.sum() / (room**2 / (2 * bar) + chances.sum()))
    return np.minimum(np.maximum(rates, -math.expm1(-bar / room)), MOST)


def expected_visits(visits: Visits) -> int:
    """About how many images a hypothesis takes that passes clearly."""
    return math.ceil(-np.expm1(-visits.weights).sum())


def new_margins(visits: Visits, base: np.ndarray, chosen: np.ndarray) -> Tensor:
    """The margins for the next step, in which the chosen hypothesis is the base.

    base, chosen: margins of the first visits, in their order.
    """
    order, both = visits.order.cpu(), min(len(base), len(chosen))
    distance, change = visits.margins[0].clone(), torch.full_like(visits.margins[1], torch.nan)
    for seen in (base, chosen):
        distance[order[: len(seen)]] = torch.from_numpy(abs(seen)).float()
    change[order[:both]] = torch.from_numpy(abs(chosen[:both] - base[:both])).float()
    return torch.stack([distance, change])


def _limit(adt: float, total: int) -> int:
    """The least difference d, of -total to total + 1, with 100 d / total >= adt.

    >>> _limit(0.3, 10_000), _limit(0.301, 1000), _limit(math.inf, 5)
    (30, 4, 6)
    """
    if not abs(adt) <= 101:
        return total + 1 if adt > 0 else -total
    d = min(max(math.ceil(adt * total / 100), -total), total + 1)
    while d > -total and 100.0 * (d - 1) / total >= adt:
        d -= 1
    while d <= total and 100.0 * d / total < adt:
        d += 1
    return d
