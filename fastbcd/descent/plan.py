"""Plan: the steps that a run is going to take, and the time they need."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastbcd.data.images import ImageData
from fastbcd.descent.budget import counts_of
from fastbcd.descent.job import Job
from fastbcd.descent.schedules import size_of
from fastbcd.descent.tuning import Tuned
from fastbcd.masking.masks import MaskSet
from fastbcd.runs.step import Step
from fastbcd.runtime.malloc import kept_memory
from fastbcd.runtime.show import say
from fastbcd.scoring.score import score
from fastbcd.training.finetuner import Finetuner

TIMED = 128  # images that scoring is timed on
MANY_EPOCHS = 1_000  # a run that means more of them warns
ACCEPTED: Any = SimpleNamespace(accepted=True, chosen=1)  # a step that a schedule may see


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

    @property
    def removals(self) -> int:
        """Steps that remove ReLUs."""
        return sum(size > 0 for size in self.sizes)

    def __str__(self) -> str:
        lines = [f"{self.removals:,} steps"]
        if self.removals:
            lines[0] += f" that remove {self._sizes()} ReLUs, at most {self.rt:,} hypotheses each"
        if self.epochs is not None:
            lines.append(f"{self.epochs:,.6g} epochs of training")
            after = len(self.sizes) - self.removals
            if after:
                lines[-1] += f", {after:,} of them after the last removal"
        if self.seconds:
            parts = [f"{name} {seconds / 60:,.1f}" for name, seconds in self.seconds.items()]
            total = sum(self.seconds.values()) / 60
            lines.append(f"about {total:,.1f} minutes: {', '.join(parts)}")
        return "plan: " + "\n      ".join(lines)

    def _sizes(self) -> str:
        texts = [f"{size:,}" for size in self.sizes if size]
        if len(texts) > 5:
            texts = [*texts[:3], "…", texts[-1]]
        return ", ".join(texts)


def show_plan(job: Job, history: Sequence[Step], kept: MaskSet) -> None:
    """Print what a run does after the steps of `history`, and the time it takes."""
    counts = counts_of(kept)
    plan = planned(job, history, counts)
    say(f"{counts.sum():,} ReLUs, budget {_shown(job.budget)}\n{_measured(plan, job)}")


def warn_of_epochs(job: Job, history: Sequence[Step], kept: MaskSet) -> None:
    """Warn if what is left of a run means very many epochs."""
    plan = planned(job, history, counts_of(kept))
    if (plan.epochs or 0) > MANY_EPOCHS:
        warnings.warn(
            f"{len(plan.sizes):,} steps mean {plan.epochs:,.6g} epochs of fine-tuning: give a "
            f"larger drc or fewer epochs, or use fastbcd.linearize, which spends a given number",
            stacklevel=4,
        )


def planned(job: Job, history: Sequence[Step], counts: np.ndarray) -> Plan:
    """What a run does after the steps of `history`; with a schedule that adapts, an estimate.

    counts: the ReLUs that each site keeps then.
    """
    limits = job.limits
    least = limits.least()
    value = limits.value(counts)
    count = int(counts.sum())
    rounding = 1e-9 * abs(value)
    sizes: list[int] = []
    while value - limits.most > rounding and count:
        per_relu = (value - least) / count
        enough = max(1, math.ceil((value - limits.most) / per_relu - 1e-9))
        size = size_of(job.search.drc, count, [*history, *[ACCEPTED] * len(sizes)])
        sizes.append(min(size, enough))
        value -= sizes[-1] * per_relu
        count -= sizes[-1]
    if job.training.epochs is None:
        return Plan(sizes, None, job.search.rt)
    left = job.epochs_left(history)
    on_the_way = job.training.epochs * len(sizes)
    after = math.ceil(max(0.0, left - on_the_way) - 1e-6)
    return Plan([*sizes, *[0] * after], max(left, on_the_way), job.search.rt)


def _measured(plan: Plan, job: Job) -> Plan:
    """The plan with seconds, from a part of a step on a few images.

    Every step is taken to score all `rt` hypotheses; the net is not changed.
    """
    if not plan.sizes:
        return plan
    problem = job.problem
    images = problem.scored.first(min(TIMED, len(problem.scored)))
    propose, forward = _times(job, images, max(plan.sizes[0], 1))
    removal = propose + (job.trials + 1) * forward
    rests = len(plan.sizes) - plan.removals
    seconds = {"scoring": (plan.removals * removal + rests * forward) * len(problem.scored)}
    if problem.test is not None:
        tests = len(plan.sizes) / job.search.test_every
        seconds["testing"] = tests * forward * len(problem.test)
    if isinstance(job.training, Tuned) and plan.epochs:
        seconds["training"] = _epoch_seconds(job, job.training) * plan.epochs
    return dataclasses.replace(plan, seconds=seconds)


def _times(job: Job, images: ImageData, size: int) -> tuple[float, float]:
    """Seconds per image that a proposal takes, and one hypothesis."""
    net = job.problem.net
    search = job.search

    def propose() -> Any:
        return job.proposal(net, images, size, seed=search.seed, step=1)

    hypothesis = [propose()(0)]

    def score_one() -> Any:
        return score(net, hypothesis, images, job.engine, metric=search.metric, loss=search.loss)

    score_one()  # warm
    both = _seconds(score_one)  # the base and one hypothesis
    return _seconds(propose) / len(images), both / 2 / len(images)


def _epoch_seconds(job: Job, training: Tuned) -> float:
    """The seconds that an epoch of training takes."""
    tuner = training.tuner
    batch = tuner.data.first(min(len(tuner.data), training.settings.batch_size))
    copied = Finetuner(
        copy.deepcopy(job.problem.net),
        batch,
        dataclasses.replace(training.settings, epochs=1),
        training.teacher,
        seed=job.search.seed,
        loss=job.search.loss,
    )
    copied.run(0)  # warm
    return _seconds(lambda: copied.run(0)) * len(tuner.data) / len(batch)


def _seconds(work: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    with kept_memory():
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


def _shown(budget: Any) -> str:
    """A budget as text."""
    if isinstance(budget, int):
        return f"{budget:,}"
    return str(budget)
