"""Search: how a step looks for the ReLUs it removes; checked before any work."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastbcd.descent import proposals
from fastbcd.descent.step import Step
from fastbcd.runtime.validate import check_whole
from fastbcd.scoring.engine import Engine


class Schedule(ABC):
    """Derive from it to say DRC in another way; a dataclass is described in config.json.

    >>> class Halve(Schedule):
    ...     def size(self, count, history):
    ...         return max(1, count // 2)
    >>> Halve().size(1000, [])
    500
    """

    @abstractmethod
    def size(self, count: int, history: Sequence[Step]) -> int:
        """How many of `count` ReLUs to remove after the steps of `history`."""

    def description(self) -> dict[str, Any]:
        """What config.json says of it."""
        fields: dict[str, Any] = dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}
        return {"schedule": type(self).__qualname__, **fields}


@dataclass(frozen=True)
class Search:
    """How a step looks for its ReLUs. The engine never changes the outcome."""

    budget: int
    drc: int | Callable[[int], int] | Schedule
    rt: int
    adt: float
    proposal: str | proposals.Saliency
    samples: int | None
    seed: int
    engine: Engine

    def __post_init__(self) -> None:
        least = {"budget": 0, "rt": 1, "seed": 0, "samples": 1}
        least |= {} if callable(self.drc) or isinstance(self.drc, Schedule) else {"drc": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if name != "samples" or value is not None:
                check_whole(name, value, smallest)
        if isinstance(self.adt, bool) or not isinstance(self.adt, int | float):
            raise TypeError(f"adt={self.adt!r}; it is a number of percentage points")
        if math.isnan(self.adt):
            raise ValueError("adt is NaN; it is a number of percentage points, the paper's is 0.3")
        proposals.find(self.proposal)

    def size(self, count: int, history: Sequence[Step]) -> int:
        """How many of `count` ReLUs this step removes: DRC, and never below the budget."""
        size = self.drc
        if isinstance(size, Schedule):
            size = size.size(count, history)
            check_whole(f"drc.size({count}, …)", size, 1)
        elif callable(size):
            size = size(count)
            check_whole(f"drc({count})", size, 1)
        return min(int(size), count - self.budget)

    def hypotheses(self) -> int:
        """How many a step tries at most: RT, or one where all of them would be the same."""
        return 1 if proposals.is_greedy(self.proposal) else self.rt

    def outcome(self) -> dict[str, Any]:
        """What decides the outcome, for config.json."""
        drc: Any = self.drc
        if isinstance(drc, Schedule):
            drc = drc.description()
        else:
            drc = name_of(drc) if callable(drc) else int(drc)
        names = ("budget", "rt", "adt", "samples", "seed")
        proposal = proposals.describe(self.proposal)
        return {"drc": drc, "proposal": proposal, **{name: getattr(self, name) for name in names}}


def name_of(function: Callable[..., Any]) -> str:
    """What config.json calls a function.

    >>> name_of(name_of)
    'function fastbcd.descent.settings.name_of'
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"function {getattr(function, '__module__', '?')}.{name}"
