"""Exact decisions: what sums over a part of the images make certain.

A hypothesis with c correct answers and n images ahead ends with c to c + n. If c is enough, it is
certain to pass. If c + n is not, it is certain to fail: it is set aside, and continued only if no
hypothesis passes and it can still be the best. These are facts about counts, so the choice is that
of the one-by-one loop.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from fastbcd.runtime.ranks import world
from fastbcd.scoring.metric import Criterion

ROUNDING = 1e-5  # by which engines and batch sizes may differ: closer losses are equal
# By which the order of its terms may change a sum, relative to its size.
SUM_ROUNDING = 1e-9
# Images between two looks: at least a part of those seen, as a look waits for a GPU.
GROW = 16


class Exact:
    """The decision of the one-by-one loop, made when it is certain."""

    to_the_end = True  # the sums of the chosen one are wanted over all images

    def __init__(self, criterion: Criterion, samples: int, *, adt: float) -> None:
        self.criterion = criterion
        self.samples = samples
        self.adt = adt
        self.batch = 1  # images that run at a time
        self.order = torch.arange(samples)
        self.needed = samples  # images of a hypothesis, probably
        self.images: defaultdict[int, int] = defaultdict(int)  # that each has seen
        self.metric: defaultdict[int, float] = defaultdict(float)  # sums over them
        self.loss: defaultdict[int, float] = defaultdict(float)

    def seen(self, k: int) -> int:
        """How many images it was run on; they are the first ones."""
        return self.images[k]

    def add(self, k: int, answers: Tensor) -> None:
        """Take the answers to further images, DoubleTensor[2, n]."""
        # Rounded as if each rank had summed the images that it ran.
        for part in answers.tensor_split(world(), dim=1):
            metric, loss = self.criterion.sums(part)
            self.images[k] += part.shape[1]
            self.metric[k] += metric
            self.loss[k] += loss

    def forget(self, k: int) -> None:
        """All answers of a hypothesis."""
        del self.images[k]
        del self.metric[k]
        del self.loss[k]

    def totals(self, k: int) -> tuple[float, float]:
        """The sums of metric and loss over the images that it has seen."""
        return self.metric[k], self.loss[k]

    def until(self, numbers: list[int]) -> int:
        """Up to which image to run these: where one may be certain, in whole batches."""
        if self.criterion.bounds is None:
            return self.samples
        begin = self.seen(numbers[0])
        images = max(min(map(self.wait, numbers)), begin / GROW)
        batches = max(1, math.ceil(images / self.batch))
        return min(begin + batches * self.batch, self.samples)

    def wait(self, k: int) -> float:
        """Images before which a hypothesis cannot be decided: each moves a bound by one range."""
        least, most = self.ends(k)
        to_pass = self.drop(least) - self.adt
        to_fail = self.adt - self.drop(most)
        return min(to_pass, to_fail) * self.samples / 100.0 - 1.0

    def ends(self, k: int) -> tuple[float, float]:
        """The least and the largest sum of the metric with which a hypothesis can end."""
        metric = self.metric[k]
        ahead = self.samples - self.images[k]
        if not ahead:
            return metric, metric
        if self.criterion.bounds is None:
            return -math.inf, math.inf
        low, high = self.criterion.bounds
        slack = SUM_ROUNDING * self.size
        return metric + low * ahead - slack, metric + high * ahead + slack

    def drop(self, metric: float) -> float:
        """Of a hypothesis with this sum of the metric."""
        return self.criterion.points * (self.metric[-1] - metric) / self.samples

    def verdict(self, k: int) -> bool | None:
        """Does it pass? None: that is not certain."""
        least, most = self.ends(k)
        slack = SUM_ROUNDING * self.size  # a drop of ADT, up to rounding, is no pass
        if self.drop(least - slack) < self.adt:
            return True
        if self.drop(most - slack) < self.adt:
            return None
        return False

    def contenders(self) -> list[int]:
        """Those that may be the best, if none passes."""
        ends = {k: self.ends(k) for k in sorted(self.images) if k >= 0}
        floor = max(least for least, _ in ends.values()) - self.tie
        return [k for k, (_, most) in ends.items() if most >= floor]

    def record(self, chosen: int) -> dict[str, Any]:
        """Further fields of a `Choice`: the drops that are known."""
        finished = [k for k, n in self.images.items() if k >= 0 and n == self.samples]
        return {"drops": {k: self.drop(self.metric[k]) for k in finished}}

    @property
    def tie(self) -> float:
        """Sums of the metric that differ by this or less are equal."""
        return ROUNDING * self.size

    @property
    def size(self) -> float:
        """The largest size of a sum. Counts are exact; other sums depend on the engine."""
        if self.criterion.metric is None:
            return 0.0
        largest = max(map(abs, self.criterion.bounds or (0.0,)))
        return max(abs(self.metric[-1]), largest * self.samples)
