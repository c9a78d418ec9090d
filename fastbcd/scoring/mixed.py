"""Mixed precision: hypotheses run in few bits, and in float32 where these may not be enough.

An answer is right where its margin is positive. The margin in few bits differs from that in
float32 by an error; the largest error seen, times SAFETY, is the bound:

    |margin| >= bound            the answer is that of float32, as far as the errors seen say
    |margin| <  bound            the image is scored again, in float32, for all that run with it

The first images are always scored again, so that there is a bound. Every image that is scored
again shows another error, and the bound grows with it. Before a hypothesis is taken, its answers
with margins up to RING times the bound are compared with float32, and so are the base's: one that
differs shows that the bound was too small, and the step is decided again in float32.

Counts are therefore those of float32 unless an error is SAFETY times as large as all that were
seen, on an image whose margin is beyond the ring. Sums of losses have the error of few bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

SAFETY = 2.0
RING = 1.5
FIRST = 256  # images that give the first bound
# (numbers, images, precision) -> metric and loss, DoubleTensor[len(numbers), 2, len(images)]
Scorer = Callable[[list[int], Tensor, str], Tensor]


class Mixed:
    """The answers of one call, in `fast` precision where that is certain enough."""

    def __init__(self, fast: str) -> None:
        self.fast = fast
        self.bound = 0.0
        self.answers = 0  # of hypotheses to images
        self.rescored = 0  # of them, in float32
        # By number: the images of the ring, and whether the answer is right.
        self.ring: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def __call__(self, score: Scorer, numbers: list[int], images: Tensor) -> Tensor:
        """Metric and loss, DoubleTensor[len(numbers), 2, len(images)]."""
        answers = score(numbers, images, self.fast)
        margins = answers[:, 0].abs()
        wanted = ~(margins >= self.bound).all(0)  # a margin may be NaN
        if not self.answers:
            wanted[:FIRST] = True
        done = torch.zeros_like(wanted)
        while wanted.any():
            exact = score(numbers, images[wanted], "float32")
            self.learn(answers[:, 0, wanted] - exact[:, 0])
            answers[:, :, wanted] = exact
            self.rescored += exact[:, 0].numel()
            done |= wanted
            wanted = ~done & ~(margins >= self.bound).all(0)
        self.answers += margins.numel()
        for number, (values, _), size in zip(numbers, answers, margins, strict=True):
            ring = ~done & (size < RING * self.bound)
            self.ring[number].append((images[ring], values[ring] > 0))
        return answers

    def learn(self, errors: Tensor) -> None:
        """The bound is above every error."""
        sizes = errors[errors.isfinite()].abs()
        if len(sizes):
            self.bound = max(self.bound, SAFETY * float(sizes.max()))

    def confirms(self, score: Scorer, number: int) -> bool:
        """Are the answers of a hypothesis, and the base's, those of float32 within the ring?"""
        for k in (-1, number):
            images, right = map(torch.cat, zip(*self.ring[k], strict=True))
            if not len(images):
                continue
            values = score([k], images, "float32")[0, 0]
            self.rescored += len(images)
            if not torch.equal(values > 0, right):
                return False
        return True

    @property
    def share(self) -> float:
        """Answers that were scored again, of all."""
        return self.rescored / max(self.answers, 1)
