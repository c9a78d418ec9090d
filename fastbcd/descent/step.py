"""The record of a step: one line of history.jsonl."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

NUMBERED = ("drops", "images")  # fields by number of the hypothesis; JSON has texts as keys
OPTIONAL = ("epochs", "returned", "cost", "images", "interval")  # recorded only if not the default


@dataclass(kw_only=True)
class Step:
    """One step of BCD: `drc` of `before` ReLUs were removed. Accuracies in percent, losses mean CE.

    Where emptied sites saved more than the budget asked for, ReLUs of other sites `returned`:
    after = before - drc + returned.
    Steps of `linearize` at the budget only train: their drc is 0.
    With a metric of your own, accuracies are its mean, in percent of its range if it has bounds.
    int(step) is its number, 1 for the first.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4), nn.Linear(4, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> run = fastbcd.bcd(net, data, budget=1, drc=2, rt=1, finetune=None)
    >>> print(run.history[1])  # doctest: +ELLIPSIS
    step 2: 2 → 1 ReLUs, ... after 1, train ... → ... %, ...
    """

    number: int
    before: int
    after: int
    drc: int
    tried: int  # hypotheses, as the loop over one at a time would count them
    chosen: int  # the number of the chosen one, from 0
    accepted: bool  # its drop is below ADT; if False all RT failed and it is the best of them
    drops: dict[int, float]  # percentage points, of the hypotheses scored on all images
    base_accuracy: float  # on the train set, before the removal
    base_loss: float
    chosen_accuracy: float  # after it, before any return or training
    chosen_loss: float
    engine: str
    sites: list[int] | None = None  # ReLUs kept at each site after it; None in older records
    epochs: float | None = None  # of fine-tuning by `Finetune`; None in older records
    train_loss: float | None = None  # of the last epoch of the training, if it is known
    test_accuracy: float | None = None  # after the training, if there is test data
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    returned: int = 0  # ReLUs removed in this step or earlier
    cost: float | None = None  # after it, in the unit of the target; None without a target
    # With a confidence, accuracies, losses and drops are estimates; recorded only then:
    images: dict[int, int] | None = None  # that each decision took, by number; -1: the base
    interval: list[float] | None = None  # holds the chosen drop, with the stated probability
    unit = " %"  # of accuracies; "" for a metric without bounds; not recorded

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Step:
        """The step whose `as_json` is `record`."""
        numbered = {name: record[name] for name in NUMBERED if name in record}
        return cls(**record | {k: {int(n): v for n, v in d.items()} for k, d in numbered.items()})

    def as_json(self) -> dict[str, Any]:
        """A dictionary that JSON can hold."""
        record = dataclasses.asdict(self)
        for name in OPTIONAL:
            if record[name] == getattr(type(self), name):
                del record[name]
        numbered = {name: record[name] for name in NUMBERED if name in record}
        return record | {k: {str(n): v for n, v in d.items()} for k, d in numbered.items()}

    def __index__(self) -> int:
        return self.number

    def __str__(self) -> str:
        text = f"step {self.number}: {self.before:,} → {self.after:,} ReLUs, "
        text += "" if self.cost is None else f"cost {self.cost:,.6g}, "
        text += f"{'accepted' if self.accepted else 'exhausted'} after {self.tried}, "
        text += f"train {self.base_accuracy:.2f} → {self.chosen_accuracy:.2f}{self.unit}, "
        if not self.drc:
            text = f"step {self.number}: {self.after:,} ReLUs, only training, "
            text += f"train {self.base_accuracy:.2f}{self.unit}, "
        text += "" if self.train_loss is None else f"loss {self.train_loss:.4f}, "
        text += "" if self.test_accuracy is None else f"test {self.test_accuracy:.2f}{self.unit}, "
        spent = ", ".join(f"{k} {v:.1f}" for k, v in self.seconds.items() if v >= 0.05)
        return text + f"{sum(self.seconds.values()):.1f} s" + (f" ({spent})" if spent else "")


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the context lasts to seconds[name]."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin
