"""The search of a step with a confidence: each decision takes the images that it needs.

Images are visited in an order that each step draws for itself: first all that are likely to
change their answer, as their margins in earlier steps say, then the others at random. What the
first add to a difference is exact; the rest is bounded by confidence.py. Decisions are made at
fixed numbers of images, so they depend on no engine, batch size or number of ranks.

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
SURE = 0.99  # the share of changes that are smaller than the distance of an image that is drawn
EPOCH = 2**32  # of the random order; no training has so many epochs


# (numbers, begin, end) -> by number (-1: the base): margins and losses of these visits, [2, n].
# The margin is the logit of the label minus the largest other one: negative if the answer is wrong.
Visit = Callable[[list[int], int, int], dict[int, np.ndarray]]


class Sampled:
    """One step's search: who answers what so far, and what is decided.

    visit: runs hypotheses on the images of a range of visits. first: how many of the `total`
    visits go to images that are not drawn at random. whole: run the base on all images at once.
    """

    def __init__(
        self, visit: Visit, total: int, first: int, *, adt: float, confidence: float,
        whole: bool = False,
    ) -> None:  # fmt: skip
        self.visit, self.total, self.first, self.error = visit, total, first, 1.0 - confidence
        # A difference of `limit` or more answers is no pass.
        self.limit = _limit(adt, total)
        self.looks = [first] if first else []
        while (n := self.looks[-1] if self.looks else 0) < total:
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
        share = self.error / ((k + 1) * (k + 2))
        below = self.is_below(-1, [k], look, self.limit, share)[0]
        return None if below == 0 else bool(below > 0)

    def is_below(self, one: int, others: list[int], n: int, limit: int, error: float) -> np.ndarray:
        """After n visits: 1 where D of the pair (one, other) is below the limit, -1 where not.

        0: not decided. The evidence is convex in d: if it grows from limit - 1 to limit, what is
        larger has even more evidence against it; otherwise what is smaller has.
        """
        exact, losses, gains = self.pair(one, others, n)
        at = np.array([[limit - 1], [limit]]) - exact
        evidence = log_evidence(losses, gains, n - self.first, self.total - self.first, at)
        same = evidence[1] == evidence[0]  # both are impossible
        below = np.where(same, losses - gains < at[1], evidence[1] > evidence[0])
        sure = np.where(below, evidence[1], evidence[0]) >= -math.log(error)
        return np.where(sure, np.where(below, 1, -1), 0)

    def pair(self, one: int, others: list[int], n: int) -> tuple[np.ndarray, ...]:
        """D among the first images; losses and gains among those that were drawn, [len(others)]."""
        a, b = self.found[one][0, :n] > 0, np.stack([self.found[k][0, :n] for k in others]) > 0
        losses, gains = a & ~b, b & ~a
        front = slice(0, self.first)
        exact = losses[:, front].sum(1) - gains[:, front].sum(1)
        return exact, losses[:, self.first :].sum(1), gains[:, self.first :].sum(1)

    def best(self) -> list[int]:
        """If none passes: those that may be the best, one, or several that saw all images."""
        left = sorted(k for k in self.found if k >= 0)
        error = self.error / (len(left) + 1) / max(len(left) - 1, 1)
        while len(left) > 1:
            n = min(self.seen(k) for k in left)
            leader = max(left, key=lambda k: (self.found[k][0, :n] > 0).sum())
            others = [k for k in left if k != leader]
            # D of the pair (leader, k) is 1 or more: k has fewer correct answers.
            worse = self.is_below(leader, others, n, 1, error) < 0
            left = [leader, *(k for k, out in zip(others, worse, strict=True) if not out)]
            if n == self.total:
                break
            if behind := [k for k in left if self.seen(k) == n]:
                self.proceed(behind)
        return sorted(left)

    # ------------------------------------------------------------------ what is reported

    def estimate(self, k: int) -> tuple[float, float]:
        """Correct answers and summed loss on all images, estimated from those that were seen."""
        values = np.stack([self.found[k][0] > 0, self.found[k][1]])
        front, rest = values[:, : self.first], values[:, self.first :]
        drawn = rest if rest.size else front
        correct, loss = front.sum(1) + drawn.mean(1) * (self.total - front.shape[1])
        return float(correct), float(loss)

    def drop(self, k: int) -> float:
        """The drop in percentage points, estimated from the images that were seen."""
        n = self.seen(k)  # the base has seen these images too
        exact, losses, gains = (int(a[0]) for a in self.pair(-1, [k], n))
        scale = (self.total - self.first) / max(n - self.first, 1)
        return 100.0 * (exact + (losses - gains) * scale) / self.total

    def interval(self, k: int) -> tuple[float, float]:
        """Holds the exact drop in percentage points, with the probability `confidence`."""
        n = self.seen(k)
        exact, losses, gains = (int(a[0]) for a in self.pair(-1, [k], n))
        ends = interval(losses, gains, n - self.first, self.total - self.first, self.error)
        return 100.0 * (exact + ends[0]) / self.total, 100.0 * (exact + ends[1]) / self.total


class Visits(NamedTuple):
    """In which order a step visits the images, and what is known of them."""

    order: Tensor  # int64 [N]
    first: int  # so many of them are not drawn at random
    margins: Tensor  # [2, N], see `visiting_order`


def visiting_order(data: ImageData, margins: Tensor | None, *, seed: int, step: int) -> Visits:
    """The visits of a step.

    margins [2, N]: of each image its distance from another answer when it was last seen, and by
    how much the last hypothesis changed that; NaN where it is not known. Images that are closer
    to another answer than most changes are large come first. All this was known before the
    hypotheses of this step, so that any use of it is allowed.
    """
    order = data.order(seed=seed, step=step, epoch=EPOCH)
    if margins is None:
        margins = torch.full((2, len(data)), torch.nan)
    elif margins.shape != (2, len(data)):
        raise ValueError(f"margins have shape {list(margins.shape)} beside {len(data)} images")
    distance, change = margins.cpu()
    front = distance < change.nanquantile(SURE)  # nothing is below NaN
    if int(front.sum()) > len(data) // 2:
        front[:] = False
    chosen = front.to(order.device)[order]
    return Visits(torch.cat([order[chosen], order[~chosen]]), int(front.sum()), margins)


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


def expected_visits(visits: Visits, adt: float, confidence: float) -> int:
    """About how many images a hypothesis takes that changes few answers.

    That none of `limit` losses is among n of N images has the probability (1 - n/N)^limit.
    """
    total, drawn = len(visits.order), len(visits.order) - visits.first
    limit = max(_limit(adt, total), 1)
    share = min(1.0, 1.5 * (1.0 - ((1.0 - confidence) / 2) ** (1.0 / limit)))
    return visits.first + math.ceil(drawn * share)


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
