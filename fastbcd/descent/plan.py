"""Plan: the steps that a run is going to take, and the time they need."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fastbcd.data.images import ImageData
from fastbcd.runtime.malloc import kept_memory
from fastbcd.scoring.engine import Engine
from fastbcd.scoring.metric import Loss, Metric
from fastbcd.scoring.score import score
from fastbcd.training.finetuner import Finetuner

SOME = 128  # images that scoring is timed on


@dataclass(frozen=True)
class Plan:
    """What a run does. str() gives a few lines to print before it starts.

    >>> print(Plan([500, 300, 200, 0, 0], epochs=5, rt=4))
    plan: 3 steps that remove 500, 300, 200 ReLUs, at most 4 hypotheses each
          5 epochs of training, 2 of them after the last removal
    """

    sizes: list[int]  # ReLUs that each step removes; 0: it only trains
    epochs: float | None  # of training, over all steps; None: the training is the user's
    rt: int
    seconds: dict[str, float] = field(default_factory=dict)  # expected, by phase

    def measured(
        self, net: nn.Module, scored: ImageData, *, proposal: Any, engine: Engine,
        tuner: Finetuner | None, teacher: nn.Module | None, test: ImageData | None,
        metric: Metric | None, loss: Loss | None, seed: int,
    ) -> Plan:  # fmt: skip
        """The same plan with seconds, from a part of a step on a few images.

        Every step is taken to score all `rt` hypotheses; the net is not changed.
        """
        if not self.sizes:
            return self
        some, size = scored.first(min(SOME, len(scored))), max(self.sizes[0], 1)
        steps, per_image = sum(map(bool, self.sizes)), 1 / len(some)
        draw = proposal(net, some, size, seed=seed, step=1)  # once more below, when it is warm
        propose = _time(lambda: proposal(net, some, size, seed=seed, step=1))
        one = [draw(0)]
        two = _time(lambda: score(net, one, some, engine, metric=metric, loss=loss), warm=True)
        forward = two * per_image / 2  # the base and one hypothesis
        rt = 1 if getattr(proposal, "greedy", False) else self.rt
        search = propose * per_image + (rt + 1) * forward
        rest = (len(self.sizes) - steps) * forward
        seconds = {"scoring": (steps * search + rest) * len(scored)}
        if test is not None:
            seconds["testing"] = len(self.sizes) * forward * len(test)
        if tuner is not None and self.epochs:
            s = tuner.settings
            batch = tuner.data.first(min(len(tuner.data), s.batch_size))
            copied = Finetuner(
                copy.deepcopy(net), batch, dataclasses.replace(s, epochs=1), teacher,
                seed=seed, loss=loss,
            )  # fmt: skip
            epoch = _time(lambda: copied.run(0), warm=True) * len(tuner.data) / len(batch)
            seconds["training"] = epoch * self.epochs
        return dataclasses.replace(self, seconds=seconds)

    def __str__(self) -> str:
        sizes = [f"{size:,}" for size in self.sizes if size]
        some = sizes if len(sizes) <= 5 else [*sizes[:3], "…", sizes[-1]]
        removing = f"remove {', '.join(some)} ReLUs, at most {self.rt:,} hypotheses each"
        lines = [f"{len(sizes):,} steps" + f" that {removing}" * bool(sizes)]
        if self.epochs is not None:
            after = len(self.sizes) - len(sizes)
            end = f", {after:,} of them after the last removal" * bool(after)
            lines.append(f"{self.epochs:,.6g} epochs of training{end}")
        if self.seconds:
            parts = ", ".join(f"{name} {t / 60:,.1f}" for name, t in self.seconds.items())
            lines.append(f"about {sum(self.seconds.values()) / 60:,.1f} minutes: {parts}")
        return "plan: " + "\n      ".join(lines)


def _time(work: Callable[[], object], warm: bool = False) -> float:
    """The seconds that a call takes; warm: of the second call."""
    with kept_memory():
        if warm:
            work()
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
