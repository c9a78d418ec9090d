"""The selection of a step: which hypotheses run on which images next, until one is chosen.

A decision knows what is certain of a hypothesis from the images that it was run on: exact.py by
counting, confident.py by a bound on the error. The selection runs what is not certain, and no
more: hypotheses of a wave together, until the first that passes is known; if none passes, those
that may still be the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from fastbcd.scoring.confident import Confident
from fastbcd.scoring.exact import ROUNDING, Exact

# (numbers, begin, end) -> by number, metric and loss of these visits, DoubleTensor[2, n]; see
# answers.py. Number -1 is the base.
Run = Callable[[list[int], int, int], dict[int, Tensor]]


class Selection:
    """One step's selection."""

    def __init__(
        self,
        run: Run,
        decision: Exact | Confident,
        in_float32: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        """in_float32: (number, end) -> answers to the first visits; None: those of `run` are."""
        self.run = run
        self.decision = decision
        self.in_float32 = in_float32

    def proceed(self, numbers: list[int], end: int) -> None:
        """Run hypotheses that have seen the same images up to `end`; the base, if it must."""
        decision = self.decision
        begin = decision.seen(numbers[0])
        if -1 not in numbers and decision.seen(-1) < end:
            numbers = [-1, *numbers]
        for k, answers in self.run(numbers, begin, end).items():
            decision.add(k, answers)

    def complete(self, *numbers: int) -> None:
        """Run those that have seen the same images on all others."""
        samples = self.decision.samples
        if self.decision.seen(numbers[0]) < samples:
            self.proceed([*numbers], samples)

    def choose(self, waves: Iterable[list[int]]) -> tuple[int, bool]:
        """The first hypothesis that passes, or else the best; and whether it passes."""
        passed = None
        for wave in waves:
            passed = self.first_that_passes(wave)
            if passed is not None:
                break
        chosen = passed
        if chosen is None:
            chosen = self.best()
        if self.decision.to_the_end:
            self.complete(chosen)
        return chosen, passed is not None

    def first_that_passes(self, undecided: list[int]) -> int | None:
        """The first of these hypotheses, in ascending order; None if none passes."""
        passed = None
        while undecided:
            verdicts = {k: self.decision.verdict(k) for k in undecided}
            undecided = []
            for k, passes in verdicts.items():
                if passes:
                    passed = k
                    break
                if passes is None:
                    undecided.append(k)
            if undecided:
                self.proceed(undecided, self.decision.until(undecided))
        return passed

    def best(self) -> int:
        """If none passes: the largest metric, then the smaller loss, then the lower number."""
        decision = self.decision
        while True:
            left = decision.contenders()
            unfinished = [k for k in left if decision.seen(k) < decision.samples]
            if len(left) == 1 or not unfinished:
                break
            behind = min(map(decision.seen, unfinished))
            together = [k for k in unfinished if decision.seen(k) == behind]
            self.proceed(together, decision.until(together))
        totals = {k: decision.totals(k) for k in left}
        most = max(metric for metric, _ in totals.values()) - decision.tie
        best, *others = (k for k in left if totals[k][0] >= most)
        if others and self.in_float32 is not None:  # losses of few bits say little
            for k in (best, *others):
                answers = self.in_float32(k, decision.seen(k))
                decision.forget(k)
                decision.add(k, answers)
                totals[k] = decision.totals(k)
        for k in others:
            mean, least = (totals[n][1] / decision.samples for n in (k, best))
            if fewer(mean, least):
                best = k
        return best


def fewer(one: float, other: float) -> bool:
    """Is a loss smaller than another by more than rounding?

    >>> fewer(1.0, 1.1), fewer(1.0, 1.0 + 1e-9)
    (True, False)
    """
    return one < other - ROUNDING * max(1.0, other)
