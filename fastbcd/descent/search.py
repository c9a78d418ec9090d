"""Algorithm 1 as a generator of steps: propose, choose, remove, train, save.

    for step in descend(job, run):
        ...                        # train the net: the ReLUs of this step are removed

Each step draws up to RT hypotheses of DRC kept ReLUs, takes the first whose accuracy on the train
set drops by less than ADT percentage points, or else the one that drops least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastbcd.data.images import ImageData
from fastbcd.descent.goals import Goal, to_return
from fastbcd.descent.job import Job
from fastbcd.descent.schedules import size_of
from fastbcd.masking.masks import MaskSet, masks, set_masks
from fastbcd.runs.journal import Journal
from fastbcd.runs.step import Start, Step, timed
from fastbcd.runtime.show import say
from fastbcd.runtime.validate import check_number
from fastbcd.scoring.choose import Choice, choose
from fastbcd.scoring.score import score

MARGINS = "confidence/margins"  # in the saved state, beside the tensors of the net


def descend(job: Job, run: Journal[Step], *, progress: bool = False) -> Iterator[Step]:
    """The steps of a run that are left. Each is finished when the next one is asked for.

    Once the budget is met, steps only train, until the epochs of the job are spent.
    """
    job = job.at(run.start)
    net = job.problem.net
    start = _start_bits(run)
    while not job.over(run.history):
        step = _rest(job, run) if job.met() else _remove(job, run, start)
        after = masks(net).copy()
        with timed(step.seconds, "finetune"):
            yield step
        _check_unchanged(masks(net), after)
        job.training.settle(net)
        step.train_loss = _loss(step.train_loss)
        with timed(step.seconds, "test"):
            run.check_finite()
            job.problem.check_outputs()
            due = step.number % job.search.test_every == 0
            if due or job.over([*run.history, step]):
                step.test_accuracy = job.problem.accuracy()
        run.finish(step, run.extra)
        if progress:
            say(str(step))
        job.report(step)


def _remove(job: Job, run: Journal[Step], start: Tensor) -> Step:
    """Remove the hypothesis that the step takes, return what the limits allow, and record it."""
    problem = job.problem
    before = masks(problem.net).copy()
    goal = goal_of(job, run.start, run.history)
    number = len(run.history) + 1
    choice, seconds = decide(job, problem.scored, goal, number, run.extra.get(MARGINS))
    set_masks(problem.net, before.without(choice.removal))
    returned = to_return(
        problem.net,
        problem.scored,
        job.limits,
        loss=problem.criterion.loss,
        among=start,
    )
    set_masks(problem.net, masks(problem.net).including(returned))
    if choice.margins is not None:
        run.extra = {MARGINS: choice.margins}
    return Step(
        **_facts(job, run, before),
        drc=len(choice.removal),
        returned=len(returned),
        tried=choice.number + 1 if choice.accepted else job.trials,
        chosen=choice.number,
        accepted=choice.accepted,
        drops=dict(sorted(choice.drops.items())),
        base_accuracy=choice.base_percent,
        base_loss=choice.base_loss,
        chosen_accuracy=choice.percent,
        chosen_loss=choice.loss,
        engine=choice.engine,
        images=choice.seen,
        interval=choice.interval,
        rescored=choice.rescored,
        seconds=seconds,
    )


def _rest(job: Job, run: Journal[Step]) -> Step:
    """The record of a step that only trains."""
    problem = job.problem
    criterion = problem.criterion
    nothing = torch.zeros(0, 1, dtype=torch.int64)
    seconds: dict[str, float] = {}
    with timed(seconds, "score"):
        scores = score(
            problem.net,
            nothing,
            problem.scored,
            job.engine,
            metric=criterion.metric,
            loss=criterion.loss,
        )
    accuracy = criterion.percent(scores.base_value)
    return Step(
        **_facts(job, run, masks(problem.net)),
        drc=0,
        base_accuracy=accuracy,
        base_loss=scores.base_loss,
        chosen_accuracy=accuracy,
        chosen_loss=scores.base_loss,
        engine=scores.engine,
        seconds=seconds,
    )


def _facts(job: Job, run: Journal[Step], before: MaskSet) -> dict[str, Any]:
    """What every record has; the net is as it is after the removal."""
    after = masks(job.problem.net)
    return {
        "number": len(run.history) + 1,
        "before": before.count(),
        "after": after.count(),
        "cost": job.cost(),
        "sites": list(after.counts().values()),
        "unit": job.problem.unit,
    }


def goal_of(job: Job, start: Start, history: Sequence[Step]) -> Goal:
    """What the step after those of `history` must reach."""
    kept = masks(job.problem.net).copy()
    size = size_of(job.search.drc, kept.count(), history)
    limits = job.limits.step(job.counts, size, (start.value, start.sites))
    return Goal(kept, limits, job.limits)


def decide(
    job: Job, images: ImageData, goal: Goal, number: int, margins: Tensor | None = None
) -> tuple[Choice, dict[str, float]]:
    """The first hypothesis that is accepted, or the best of RT, and the seconds it took."""
    search = job.search
    net = job.problem.net
    seconds: dict[str, float] = {}
    with timed(seconds, "propose"):
        draw = job.proposal.toward(net, images, goal, seed=search.seed, step=number)
    with timed(seconds, "score"):
        choice = choose(
            net,
            map(draw, range(job.trials)),
            images,
            adt=search.adt,
            engine=job.engine,
            metric=search.metric,
            loss=search.loss,
            confidence=search.confidence,
            seed=search.seed,
            step=number,
            margins=margins,
        )
    return choice, seconds


def _start_bits(run: Journal[Step]) -> Tensor:
    """The bits of the net before the first step, [total]: no other ReLU returns."""
    tensors = run.start_tensors()
    names = [f"{site.name}.mask".lstrip(".") for site in masks(run.net).sites]
    return torch.cat([tensors[name].flatten().bool() for name in names])


def _loss(loss: Any) -> float | None:
    """The loss that a training reports, as a number."""
    if hasattr(loss, "item"):
        loss = loss.item()
    if loss is not None:
        check_number("step.train_loss", loss)
    return loss


def _check_unchanged(now: MaskSet, expected: MaskSet) -> None:
    """Refuse masks that were changed between the removal and the end of a step's training."""
    changed = (now.bits != expected.bits).nonzero().flatten()
    if len(changed):
        site, position = now.locate(int(changed[0]))
        raise RuntimeError(
            f"the training changed the masks: {len(changed)} bits, the first at site "
            f"{site.name!r}, position {position}; training may change weights only"
        )
