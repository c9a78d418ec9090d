"""The search of a step: which hypotheses run on which images next, until one is chosen.

A decision knows what is certain of a hypothesis from the images that it was run on: exact.py by
counting, confident.py by a bound on the error. The search runs what is not certain, and no more:
hypotheses of a wave together, until the first that passes is known; if none passes, those that may
still be the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

ROUNDING = 1e-5  # by which engines and batch sizes may differ: closer losses are equal

# (numbers, begin, end) -> by number, metric and loss of these visits, DoubleTensor[2, n]; see
# answers.py. Number -1 is the base.
Run = Callable[[list[int], int, int], dict[int, Tensor]]


class Decision(Protocol):
    """What is certain of hypotheses, by number."""

    samples: int
    to_the_end: bool  # the numbers of the chosen one are wanted of all images

    @property
    def tie(self) -> float:
        """Sums of the metric that differ by this or less are equal."""

    def seen(self, k: int) -> int:
        """How many images it was run on; they are the first ones."""

    def until(self, numbers: list[int]) -> int:
        """Up to which image to run those that have seen the same images."""

    def add(self, k: int, answers: Tensor) -> None:
        """Take the answers to further images, DoubleTensor[2, n]."""

    def verdict(self, k: int) -> bool | None:
        """Does it pass? None: that is not certain."""

    def contenders(self) -> list[int]:
        """Those that may be the best, if none passes."""

    def totals(self, k: int) -> tuple[float, float]:
        """The sums of metric and loss over all images, or estimates of them."""

    def record(self, chosen: int) -> dict[str, Any]:
        """Further fields of a `Choice`: the drops that are known."""


class Search:
    """One step's search."""

    def __init__(self, run: Run, decision: Decision) -> None:
        self.run = run
        self.decision = decision

    def proceed(self, numbers: list[int]) -> None:
        """Run hypotheses that have seen the same images on the next; and the base, if it must."""
        decision = self.decision
        begin = decision.seen(numbers[0])
        end = decision.until(numbers)
        if -1 not in numbers and decision.seen(-1) < end:
            numbers = [-1, *numbers]
        for k, answers in self.run(numbers, begin, end).items():
            decision.add(k, answers)

    def complete(self, *numbers: int) -> None:
        """Run those that have seen the same images on all others."""
        while self.decision.seen(numbers[0]) < self.decision.samples:
            self.proceed([*numbers])

    def choose(self, waves: Iterable[list[int]]) -> tuple[int, bool]:
        """The first hypothesis that passes, or else the best; and whether it passes."""
        number = None
        for wave in waves:
            number = self.wave(wave)
            if number is not None:
                break
        accepted = number is not None
        if number is None:
            number = self.best()
        if self.decision.to_the_end:
            self.complete(number)
        return number, accepted

    def wave(self, numbers: Iterable[int]) -> int | None:
        """The first of these hypotheses that passes; None if none does."""
        undecided = sorted(numbers)
        passed = None
        while True:
            verdicts = {k: self.decision.verdict(k) for k in undecided}
            passing = [k for k in undecided if verdicts[k]]
            if passing:
                passed = passing[0]
            undecided = [k for k in undecided if verdicts[k] is None]
            if passed is not None:
                undecided = [k for k in undecided if k < passed]
            if not undecided:
                return passed
            self.proceed(undecided)

    def best(self) -> int:
        """If none passes: the largest metric, then the smaller loss, then the lower number."""
        decision = self.decision
        while True:
            left = decision.contenders()
            unfinished = [k for k in left if decision.seen(k) < decision.samples]
            if len(left) == 1 or not unfinished:
                break
            behind = min(map(decision.seen, unfinished))
            self.proceed([k for k in unfinished if decision.seen(k) == behind])
        totals = {k: decision.totals(k) for k in left}
        most = max(value for value, _ in totals.values()) - decision.tie
        best, *others = (k for k, (value, _) in totals.items() if value >= most)
        for k in others:
            if fewer(
                totals[k][1] / decision.samples, totals[best][1] / decision.samples
            ):
                best = k
        return best


def fewer(one: float, other: float) -> bool:
    """Is a loss smaller than another by more than rounding?

    >>> fewer(1.0, 1.1), fewer(1.0, 1.0 + 1e-9)
    (True, False)
    """
    return one < other - ROUNDING * max(1.0, other)
