"""Records: what each step of a run found and did, one line of JSON in its history."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from fastbcd.scoring.choose import Choice


@dataclass
class Step:
    """One step: `drc` of `before` ReLUs were removed. Accuracies in percent, losses mean CE.

    It can stand where a number is wanted: int(step) is its number, 1 for the first.

    >>> print(Step(1, 300, 200, 100, 3, 2, True, {2: 0.1}, 98.0, 0.06, 97.9, 0.07, "collapsed"))
    step 1: 300 → 200 ReLUs, accepted after 3, train 98.00 → 97.90 %, 0.0 s
    """

    number: int
    before: int
    after: int
    drc: int
    tried: int  # hypotheses, counted as the one-by-one loop would
    chosen: int  # the number of the one that was taken, from 0
    accepted: bool  # its drop is below ADT; otherwise RT was exhausted and it is the best
    drops: dict[int, float]  # percentage points, of the hypotheses scored on all images
    base_accuracy: float  # on the train set, before the removal
    base_loss: float
    chosen_accuracy: float  # after it, before any training
    chosen_loss: float
    engine: str
    train_loss: float | None = None  # of the last epoch of the training, if that was said
    test_accuracy: float | None = None  # after the training, if there is test data
    seconds: dict[str, float] = field(default_factory=dict)  # by phase

    @classmethod
    def begun(cls, number: int, before: int, rt: int, choice: Choice) -> Step:
        """The record of a step whose removal is done and whose training is to come."""
        size, samples = len(choice.removal), choice.samples
        return cls(
            number, before, before - size, size, choice.number + 1 if choice.accepted else rt,
            choice.number, choice.accepted, dict(sorted(choice.drops.items())),
            100.0 * choice.base_correct / samples, choice.base_loss,
            100.0 * choice.correct / samples, choice.loss, choice.engine,
        )  # fmt: skip

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Step:
        """What `as_json` made."""
        return cls(**{**record, "drops": {int(k): v for k, v in record["drops"].items()}})

    def as_json(self) -> dict[str, Any]:
        """A dictionary that JSON can hold."""
        record = dataclasses.asdict(self)
        return {**record, "drops": {str(k): v for k, v in self.drops.items()}}

    def __index__(self) -> int:
        return self.number

    def __str__(self) -> str:
        verdict = "accepted" if self.accepted else "exhausted"
        parts = [
            f"step {self.number}: {self.before:,} → {self.after:,} ReLUs",
            f"{verdict} after {self.tried}",
            f"train {self.base_accuracy:.2f} → {self.chosen_accuracy:.2f} %",
        ]
        if self.train_loss is not None:
            parts.append(f"loss {self.train_loss:.4f}")
        if self.test_accuracy is not None:
            parts.append(f"test {self.test_accuracy:.2f} %")
        spent = ", ".join(f"{k} {v:.1f}" for k, v in self.seconds.items() if v >= 0.05)
        total = f"{sum(self.seconds.values()):.1f} s"
        return ", ".join([*parts, total + (f" ({spent})" if spent else "")])


class Clock:
    """Adds the seconds within it to seconds[name]."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        spent = time.perf_counter() - self.begin
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + spent
