"""Plan: the steps that a run is going to take, and the time they need."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastbcd.data.images import ImageData
from fastbcd.descent.budget import counts_of
from fastbcd.descent.job import Job
from fastbcd.descent.schedules import size_of
from fastbcd.descent.search import decide, descend, goal_of
from fastbcd.masking.masks import MaskSet, masks
from fastbcd.runs.journal import Journal
from fastbcd.runs.step import Step
from fastbcd.runtime import ranks
from fastbcd.runtime.show import bar, duration, say
from fastbcd.scoring.compiled import drop

MANY_EPOCHS = 1_000  # a run that means more of them warns
# A phase is timed on a few images, then twice as many, until that takes so many seconds or images.
ENOUGH = 1.0
FEW = 2
MOST = 256
SLOWER = 1.5  # per image, from which on batches are too small
# A step that a schedule may see.
ACCEPTED: Any = SimpleNamespace(accepted=True, chosen=1)


@dataclass(frozen=True)
class Plan:
    """What a run does. str() gives a few lines to print before it starts.

    >>> print(Plan([500, 300, 200, 0, 0], epochs=5, rt=4))
    plan: 3 steps that remove 500, 300, 200 ReLUs, at most 4 hypotheses each
          5 epochs of training, 2 of them after the last removal
    """

    sizes: list[int]  # ReLUs that each step removes; 0: it only trains
    epochs: float | None  # of training in all; None: the training is the user's
    rt: int

    @property
    def removals(self) -> int:
        """Steps that remove ReLUs."""
        return sum(size > 0 for size in self.sizes)

    def __str__(self) -> str:
        text = f"plan: {self.removals:,} steps"
        if self.removals:
            texts = [f"{size:,}" for size in self.sizes[: self.removals]]
            if len(texts) > 5:
                texts = [*texts[:3], "…", texts[-1]]
            text += f" that remove {', '.join(texts)} ReLUs, at most {self.rt:,} hypotheses each"
        if self.epochs is not None:
            text += f"\n      {self.epochs:,.6g} epochs of training"
            after = len(self.sizes) - self.removals
            if after:
                text += f", {after:,} of them after the last removal"
        return text


def planned(job: Job, history: Sequence[Step], kept: MaskSet) -> Plan:
    """What a run does after the steps of `history`; with a schedule that adapts, an estimate.

    kept: the masks after those steps.
    """
    limits = job.limits
    count = kept.count()
    value = limits.value(counts_of(kept))
    share = (value - limits.most) / max(value - limits.least(), 1e-9)
    to_go = math.ceil(share * count - 1e-6)
    sizes: list[int] = []
    while to_go > 0:
        size = size_of(job.search.drc, count, [*history, *[ACCEPTED] * len(sizes)])
        sizes.append(min(size, to_go))
        count -= sizes[-1]
        to_go -= sizes[-1]
    if job.training.epochs is None:
        return Plan(sizes, None, job.search.rt)
    left = job.epochs_left(history)
    on_the_way = job.training.epochs * len(sizes)
    after = math.ceil(max(0.0, left - on_the_way) - 1e-6)
    return Plan([*sizes, *[0] * after], max(left, on_the_way), job.search.rt)


def watched(job: Job, run: Journal[Step], progress: bool) -> Iterator[Step]:
    """The steps of a run that are left; progress: its plan, a bar, and a line per step."""
    kept = masks(job.problem.net)
    plan = planned(job, run.history, kept)
    if (plan.epochs or 0) > MANY_EPOCHS:
        warnings.warn(
            f"{len(plan.sizes):,} steps mean {plan.epochs:,.6g} epochs of fine-tuning: give a "
            f"larger drc or fewer epochs, or use fastbcd.linearize, which spends a given number",
            stacklevel=4,
        )
    if progress and plan.sizes:
        show_plan(job, run.history, kept)
    return iter(
        bar(progress, descend(job, run, progress=progress), total=len(plan.sizes))
    )


def show_plan(job: Job, history: Sequence[Step], kept: MaskSet) -> None:
    """Print what a run does after the steps of `history`, and the time it takes."""
    plan = planned(job, history, kept)
    say(f"{kept.count():,} ReLUs, budget {job.budget}\n{plan}")
    if ranks.rank() > 0 or not plan.sizes:
        return
    world = ranks.world()
    with ranks.alone():
        alone = _seconds(job, plan, world)
    drop(job.problem.net)  # what was made for few images may round in another way
    seconds = {name: value / world for name, value in alone.items()}
    parts = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    say(f"      about {duration(sum(seconds.values()))}: {parts}")


def _seconds(job: Job, plan: Plan, world: int) -> dict[str, float]:
    """The seconds that each phase of a plan takes on one rank; the net is not changed.

    Training is timed on batches of one of `world` ranks. A GPU takes as long for a small batch as
    for a larger one if the host is the limit, which launches as many kernels for it.
    """
    problem = job.problem
    seconds: dict[str, float] = {}
    if plan.removals:
        goal = goal_of(job, job.facts(), [])
        one = _time(lambda images: decide(job, images, goal, number=1), problem.scored)
        seconds["scoring"] = plan.removals * one
    if problem.test is not None:
        tests = math.ceil(len(plan.sizes) / job.search.test_every)
        seconds["testing"] = tests * _time(problem.accuracy_on, problem.test)
    if plan.epochs:
        one = _time(job.training.rehearse, problem.train)
        if world > 1:
            shared = partial(job.training.rehearse, ranks=world)
            whole = one
            one = _time(shared, problem.train)
            if one > SLOWER * whole:
                say(
                    f"      one rank's part of a batch takes {one / whole:.1f} times as long per "
                    f"image: the host is the limit. Raise batch_size, or run several budgets or "
                    f"seeds, one per GPU (docs/many-gpus.md)"
                )
        seconds["training"] = plan.epochs * one
    return seconds


def _time(work: Callable[[ImageData], object], data: ImageData) -> float:
    """The seconds of the work on all of the data: those of a part, and the rest at its pace."""

    def measured(size: int) -> float:
        begin = time.perf_counter()
        work(data.first(size))
        return time.perf_counter() - begin

    few = min(FEW, len(data))
    measured(few)  # makes what the others find ready
    least = measured(few)
    size = few
    seconds = least
    while seconds < ENOUGH and size < min(MOST, len(data)):
        size = min(2 * size, len(data))
        seconds = measured(size)
    pace = least / few
    if size > few:
        pace = max(0.0, seconds - least) / (size - few)
    return seconds + pace * (len(data) - size)
