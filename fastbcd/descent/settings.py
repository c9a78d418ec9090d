"""The settings of a search: how many ReLUs a step removes and which hypotheses it tries."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastbcd.descent.proposals import Proposal
from fastbcd.descent.schedules import Schedule
from fastbcd.descent.step import Step
from fastbcd.runtime.validate import check_whole
from fastbcd.scoring.engine import Engine

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Search:
    """How a step finds the ReLUs it removes. The engine never changes the outcome."""

    budget: int
    drc: int | Callable[[int], int] | Schedule
    rt: int
    adt: float
    proposal: Proposal
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
        if self.seed > MAX_SEED:
            raise ValueError(f"seed={self.seed}; it must be at most 2^63 - 1")
        if isinstance(self.adt, bool) or not isinstance(self.adt, int | float):
            raise TypeError(f"adt={self.adt!r}; it is a number of percentage points")
        if math.isnan(self.adt):
            raise ValueError("adt is NaN; it is a number of percentage points, the paper's is 0.3")
        if isinstance(self.drc, Schedule):
            try:
                json.dumps(self.drc.describe())
            except (TypeError, ValueError) as error:
                name = type(self.drc).__qualname__
                raise TypeError(f"drc {name}: describe() must be JSON-able: {error}") from None

    def size(self, count: int, history: Sequence[Step]) -> int:
        """How many of `count` ReLUs this step removes: DRC, but never below the budget."""
        size = self.drc
        if isinstance(size, Schedule):
            size = size.size(count, history)
            check_whole(f"drc.size({count}, …)", size, 1)
        elif callable(size):
            size = size(count)
            check_whole(f"drc({count})", size, 1)
        return min(int(size), count - self.budget)

    def hypotheses(self) -> int:
        """How many hypotheses a step tries at most: RT, or one if all of them are the same."""
        return 1 if getattr(self.proposal, "greedy", False) else self.rt

    def describe(self) -> dict[str, Any]:
        """What decides the outcome, for config.json."""
        drc: Any = self.drc
        if isinstance(drc, Schedule):
            drc = drc.describe()
        else:
            drc = name_of(drc) if callable(drc) else int(drc)
        names = ("budget", "rt", "adt", "samples", "seed")
        settings = {name: getattr(self, name) for name in names}
        return {"drc": drc, "proposal": self.proposal.describe(), **settings}


def name_of(function: Callable[..., Any]) -> str:
    """The name that config.json has for a function.

    >>> name_of(name_of)
    'function fastbcd.descent.settings.name_of'
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"function {getattr(function, '__module__', '?')}.{name}"
