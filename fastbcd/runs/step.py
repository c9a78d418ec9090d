"""The records of a run: one `Step` per step of a search, one `Epoch` per epoch of a training.

Each is a dataclass. Its annotations say what is written into a run's files and how it is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

Record = TypeVar("Record", bound="Step | Epoch | Start")


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
    tried: int = 0  # hypotheses, as the loop over one at a time would count them
    chosen: int = 0  # the number of the chosen one, from 0
    # Whether its drop is below ADT; if not, all RT failed and it is the best of them.
    accepted: bool = True
    # In percentage points, of the hypotheses scored on all images.
    drops: dict[int, float] = field(default_factory=dict)
    base_accuracy: float  # on the train set, before the removal
    base_loss: float
    chosen_accuracy: float  # after it, before any return or training
    chosen_loss: float
    engine: str
    sites: list[int]  # ReLUs kept at each site after it
    returned: int = 0  # ReLUs removed in this step or earlier
    # After it, in the unit of the target; None without a target.
    cost: float | None = None
    epochs: float | None = None  # of `Finetune`; None: the training is the user's
    train_loss: float | None = None  # of the last epoch of the training, if it is known
    test_accuracy: float | None = None  # after the training, if there is test data
    # With a confidence, accuracies, losses and drops are estimates. Only then there are
    # images, that each decision took, by number (-1: the base), and an interval that
    # holds the chosen drop with that probability.
    images: dict[int, int] | None = None
    interval: tuple[float, float] | None = None
    # Of the answers, in mixed precision: the share that was scored again in float32.
    rescored: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    unit: str = " %"  # of accuracies; "" for a metric without bounds

    def __index__(self) -> int:
        return self.number

    def __str__(self) -> str:
        parts = [f"step {self.number}: {self._change()}"]
        if self.train_loss is not None:
            parts.append(f"loss {self.train_loss:.4f}")
        if self.test_accuracy is not None:
            parts.append(f"test {self.test_accuracy:.2f}{self.unit}")
        return ", ".join([*parts, spent(self.seconds)])

    def _change(self) -> str:
        """What was removed, and what that did to the train accuracy."""
        if self.drc == 0:
            trained = f"train {self.base_accuracy:.2f}{self.unit}"
            return f"{self.after:,} ReLUs, only training, {trained}"
        parts = [f"{self.before:,} → {self.after:,} ReLUs"]
        if self.cost is not None:
            parts.append(f"cost {self.cost:,.6g}")
        outcome = "accepted" if self.accepted else "exhausted"
        parts.append(f"{outcome} after {self.tried}")
        change = f"{self.base_accuracy:.2f} → {self.chosen_accuracy:.2f}"
        return ", ".join([*parts, f"train {change}{self.unit}"])


@dataclass(kw_only=True)
class Epoch:
    """One epoch of `train` or of a starting point, or the decision about its masks.

    >>> print(Epoch(number=1, epoch=0, loss=1.5, lr=0.1, seconds={"epoch": 3.2}))
    epoch 1: lr 0.1, loss 1.5000, 3.2 s
    """

    number: int  # of the record, 1 for the first
    epoch: int | None = None  # of its phase, 0 for the first
    # "masks", "decided", "finetune" or "final" in a starting point.
    phase: str = "train"
    loss: float | None = None
    lr: float | None = None
    # ReLUs kept, while masks are trained and when they are decided.
    count: int | None = None
    test_accuracy: float | None = None  # percent, if there is test data
    # Of the decision: "trained", "thresholded", "final".
    accuracy: dict[str, float] | None = None
    # What one method alone records, such as λ.
    notes: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # by phase

    def __str__(self) -> str:
        parts = []
        if self.count is not None:
            parts.append(f"{self.count:,} ReLUs")
        if self.lr is not None:
            parts.append(f"lr {self.lr:.3g}")
        parts += [f"{name} {_short(value)}" for name, value in self.notes.items()]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.test_accuracy is not None:
            parts.append(f"test {self.test_accuracy:.2f} %")
        return f"epoch {self.number}: " + ", ".join([*parts, spent(self.seconds)])


@dataclass(kw_only=True)
class Start:
    """The facts about a net before its first step that later steps depend on."""

    value: float = 0.0  # what the budget bounds: ReLUs, or a cost
    sites: int = 0  # that keep a ReLU
    # For scoring, by type of device.
    memory: dict[str, int] = field(default_factory=dict)
    test_accuracy: float | None = None


def encode(record: Step | Epoch | Start) -> dict[str, Any]:
    """A record as a dictionary that JSON can hold."""
    return msgspec.to_builtins(record, str_keys=True)


def decode(kind: type[Record], values: Any, where: str) -> Record:
    """The record that `encode` made; ValueError if a field is missing or of another type."""
    try:
        return msgspec.convert(values, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from error


def spent(seconds: dict[str, float]) -> str:
    """Seconds by phase as text.

    >>> spent({"score": 2.0, "save": 0.01, "finetune": 3.0})
    '5.0 s (score 2.0, finetune 3.0)'
    """
    total = f"{sum(seconds.values()):.1f} s"
    long = [f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05]
    if len(long) < 2:
        return total
    return f"{total} ({', '.join(long)})"


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the context lasts to seconds[name]."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
