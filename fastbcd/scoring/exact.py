"""Exact decisions: what sums over a part of the images make certain.

A hypothesis with c correct answers and n images ahead ends with c to c + n. If c is enough, it is
certain to pass. If c + n is not, it is certain to fail: it is set aside, and continued only if no
hypothesis passes and it can still be the best. These are facts about counts, so the choice is that
of the one-by-one loop.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

from torch import Tensor

from fastbcd.runtime.ranks import world
from fastbcd.scoring.decision import ROUNDING
from fastbcd.scoring.metric import Criterion

SUM_ROUNDING = (
    1e-9  # by which the order of its terms may change a sum, relative to its size
)
PART = 2**18  # answers that are read at a time, at most; invalid ones are found then
GROW = 16  # images between two looks: at least a part of those seen, as a look waits for a GPU


class Sums(NamedTuple):
    """Of one hypothesis, over the images that it has seen."""

    images: int = 0
    metric: float = 0.0
    loss: float = 0.0


class Exact:
    """The decision of the one-by-one loop. With `early` it is made when it is certain."""

    to_the_end = True

    def __init__(
        self, criterion: Criterion, samples: int, *, adt: float, early: bool, batch: int
    ) -> None:
        """batch: images that run at a time."""
        self.criterion = criterion
        self.samples = samples
        self.adt = adt
        self.batch = batch
        self.bounds = None
        if early:
            self.bounds = criterion.bounds
        self.sums: defaultdict[int, Sums] = defaultdict(Sums)

    def seen(self, k: int) -> int:
        return self.sums[k].images

    def add(self, k: int, answers: Tensor) -> None:
        # Rounded as if each rank had summed the images that it ran.
        for part in answers.tensor_split(world(), dim=1):
            before = self.sums[k]
            metric, loss = self.criterion.sums(part)
            images = before.images + part.shape[1]
            self.sums[k] = Sums(images, before.metric + metric, before.loss + loss)

    def totals(self, k: int) -> tuple[float, float]:
        return self.sums[k].metric, self.sums[k].loss

    def until(self, numbers: list[int]) -> int:
        """Where something may be certain, in whole batches."""
        begin = self.seen(numbers[0])
        nothing_before = min(map(self.wait, numbers))
        images = max(nothing_before, begin / GROW)
        images = min(images, PART / len(numbers))
        batches = max(1, math.ceil(images / self.batch))
        return min(begin + batches * self.batch, self.samples)

    def wait(self, k: int) -> float:
        """Images before which a hypothesis cannot be decided: each moves a bound by one range."""
        if self.bounds is None or k < 0:
            return math.inf
        least, most = self.ends(k)
        to_pass = self.drop(least) - self.adt
        to_fail = self.adt - self.drop(most)
        return min(to_pass, to_fail) * self.samples / 100.0 - 1.0

    def ends(self, k: int) -> tuple[float, float]:
        """The least and the largest sum of the metric with which a hypothesis can end."""
        sums = self.sums[k]
        ahead = self.samples - sums.images
        if not ahead:
            return sums.metric, sums.metric
        if self.bounds is None:
            return -math.inf, math.inf
        low, high = self.bounds
        slack = self.rounding(SUM_ROUNDING)
        least = sums.metric + low * ahead - slack
        most = sums.metric + high * ahead + slack
        return least, most

    def drop(self, metric: float) -> float:
        """Of a hypothesis with this sum of the metric."""
        base = self.sums[-1].metric
        return self.criterion.points * (base - metric) / self.samples

    def verdict(self, k: int) -> bool | None:
        least, most = self.ends(k)
        slack = self.rounding(
            SUM_ROUNDING
        )  # a drop that is ADT, rounding aside, is no pass
        if self.drop(least - slack) < self.adt:
            return True
        if self.drop(most - slack) < self.adt:
            return None
        return False

    def contenders(self) -> list[int]:
        ends = {k: self.ends(k) for k in sorted(self.sums) if k >= 0}
        floor = max(least for least, _ in ends.values()) - self.tie
        return [k for k, (_, most) in ends.items() if most >= floor]

    def record(self, chosen: int) -> dict[str, Any]:
        drops = {}
        for k, sums in self.sums.items():
            if k >= 0 and sums.images == self.samples:
                drops[k] = self.drop(sums.metric)
        return {"drops": drops}

    @property
    def tie(self) -> float:
        return self.rounding(ROUNDING)

    def rounding(self, share: float) -> float:
        """A share of the size of sums. Counts are exact; other sums depend on the engine."""
        if self.criterion.metric is None:
            return 0.0
        largest = 0.0
        if self.criterion.bounds is not None:
            largest = max(map(abs, self.criterion.bounds))
        return share * max(abs(self.sums[-1].metric), largest * self.samples)
