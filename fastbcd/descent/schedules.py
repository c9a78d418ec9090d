"""Schedules of DRC: how many ReLUs a step removes.

A schedule is a pure function of the count and of the finished steps, so that a resumed run takes
the same steps as one that was not interrupted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastbcd.runs.step import Step
from fastbcd.runtime.settings import fields_of
from fastbcd.runtime.validate import check_number, check_whole


class Schedule(ABC):
    """Derive from it to compute DRC in another way. A dataclass is described by its fields.

    >>> class Halve(Schedule):
    ...     def size(self, count, history):
    ...         return max(1, count // 2)
    >>> Halve().size(1000, [])
    500
    """

    @abstractmethod
    def size(self, count: int, history: Sequence[Step]) -> int:
        """How many of `count` ReLUs to remove after the steps of `history`."""

    def describe(self) -> Any:
        """What config.json records: JSON-able, and different if the sizes are different."""
        return {"schedule": type(self).__qualname__, **fields_of(self)}


def size_of(
    drc: int | Schedule | Callable[[int], int], count: int, history: Sequence[Step]
) -> int:
    """DRC: how many of `count` ReLUs a step removes, at most all.

    >>> size_of(100, 70, []), size_of(lambda count: count // 2, 70, [])
    (70, 35)
    """
    size: Any = drc
    if isinstance(drc, Schedule):
        size = drc.size(count, history)
    elif callable(drc):
        size = drc(count)
    check_whole(f"drc({count})", size, 1)
    return min(int(size), count)


@dataclass(frozen=True)
class Fraction(Schedule):
    """A share of the ReLUs that are left, and never fewer than `least`.

    >>> [Fraction(0.08, least=50).size(count, []) for count in (10_000, 1_000, 100)]
    [800, 80, 50]
    """

    share: float
    least: int = 1

    def __post_init__(self) -> None:
        check_number("share", self.share, 0, strictly=True, most=1)
        check_whole("least", self.least, 1)

    def size(self, count: int, history: Sequence[Step]) -> int:
        # Rounded first: 0.07 * 100 is a little more than 7, 0.29 * 100 a little less than 29.
        return max(self.least, int(round(self.share * count, 6)))


@dataclass(frozen=True)
class Adaptive(Schedule):
    """More after a step whose first hypothesis met ADT, less after a step where none did.

    A step that took a later hypothesis changes nothing. `grow` and `shrink` are factors, `least`
    and `most` are bounds.

    >>> Adaptive(100, grow=2.0, shrink=0.5, most=1000).size(10_000, [])
    100
    """

    start: int
    grow: float = 1.25
    shrink: float = 0.5
    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        check_whole("least", self.least, 1)
        check_whole("start", self.start, self.least)
        check_whole("most", self.most, self.start, optional=True)
        check_number("grow", self.grow, 1)
        check_number("shrink", self.shrink, 0, strictly=True, most=1)

    def size(self, count: int, history: Sequence[Step]) -> int:
        size = self.start
        for step in history:
            if not step.accepted:
                size = max(self.least, math.floor(size * self.shrink))
            elif step.chosen == 0:
                size = math.ceil(size * self.grow)
                if self.most is not None:
                    size = min(size, self.most)
        return size


@dataclass(frozen=True)
class Shares(Schedule):
    """The same share of the ReLUs that are left in every step; the last of `steps` takes the rest.

    >>> [Shares(0.5, steps=3).size(100, history) for history in ([], [1], [1, 2])]
    [50, 50, 100]
    """

    share: float
    steps: int

    def size(self, count: int, history: Sequence[Step]) -> int:
        if len(history) + 1 >= self.steps:
            return count
        return max(1, round(self.share * count))
