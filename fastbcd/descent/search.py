"""Algorithm 1 as a generator of steps: propose, choose, remove, train, save.

    for step in descend(job, run):
        ...                        # train the net: the ReLUs of this step are removed

Each step draws up to RT hypotheses of DRC kept ReLUs, takes the first whose accuracy on the train
set drops by less than ADT percentage points, or else the one that drops least.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fastbcd.descent.goals import Goal, to_return
from fastbcd.descent.job import Job
from fastbcd.descent.schedules import size_of
from fastbcd.masking.masks import MaskSet, masks, set_masks
from fastbcd.runs.journal import Journal
from fastbcd.runs.step import Step, timed
from fastbcd.runtime.show import say
from fastbcd.scoring.choose import Choice, choose
from fastbcd.scoring.score import score

MARGINS = "confidence/margins"  # in the saved state, beside the tensors of the net


def descend(job: Job, run: Journal[Step], *, progress: bool = False) -> Iterator[Step]:
    """The steps of a run that are left. Each is finished when the next one is asked for.

    Once the budget is met, steps only train, until the epochs of the job are spent.
    """
    job = job.at(run.start)
    net = job.problem.net
    while not job.over(run.history):
        seconds: dict[str, float] = {}
        before = masks(net).copy()
        extra = dict(run.extra)
        if job.met():
            step = _rest(job, run, before, seconds)
        else:
            choice = _chosen(job, run, before, seconds)
            set_masks(net, before.without(choice.removal))
            returned = to_return(
                net, job.problem.scored, job.limits, loss=job.problem.criterion.loss
            )
            set_masks(net, masks(net).including(returned))
            step = _removal(job, run, before, choice, seconds)
            if choice.margins is not None:
                extra[MARGINS] = choice.margins
        after = masks(net).copy()
        with timed(seconds, "finetune"):
            yield step
        _check_unchanged(masks(net), after)
        if step.number % job.search.test_every == 0 or job.over([*run.history, step]):
            with timed(seconds, "test"):
                step.test_accuracy = job.problem.accuracy()
        run.finish(step, extra)
        if progress:
            say(str(step))


def _chosen(job: Job, run: Journal[Step], before: MaskSet, seconds: dict[str, float]) -> Choice:
    """The hypothesis that the next step removes: the first that is accepted, or the best of RT."""
    search = job.search
    problem = job.problem
    number = len(run.history) + 1
    size = size_of(search.drc, before.count(), run.history)
    goal = Goal(before, job.limits, job.limits).of_step(size, run.start)
    with timed(seconds, "propose"):
        draw = job.proposal.toward(problem.net, problem.scored, goal, seed=search.seed, step=number)
    with timed(seconds, "score"):
        return choose(
            problem.net,
            map(draw, range(job.trials)),
            problem.scored,
            adt=search.adt,
            engine=job.engine,
            metric=search.metric,
            loss=search.loss,
            confidence=search.confidence,
            seed=search.seed,
            step=number,
            margins=run.extra.get(MARGINS),
        )


def _removal(
    job: Job, run: Journal[Step], before: MaskSet, choice: Choice, seconds: dict[str, float]
) -> Step:
    """The record of a step whose ReLUs are removed."""
    return _record(
        job,
        run,
        before,
        drc=len(choice.removal),
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
        seconds=seconds,
    )


def _rest(job: Job, run: Journal[Step], before: MaskSet, seconds: dict[str, float]) -> Step:
    """The record of a step that only trains."""
    search = job.search
    problem = job.problem
    none = torch.zeros(0, 1, dtype=torch.int64)
    with timed(seconds, "score"):
        scores = score(
            problem.net, none, problem.scored, job.engine, metric=search.metric, loss=search.loss
        )
    accuracy = problem.criterion.percent(scores.base_value)
    return _record(
        job,
        run,
        before,
        drc=0,
        tried=0,
        chosen=0,
        accepted=True,
        drops={},
        base_accuracy=accuracy,
        base_loss=scores.base_loss,
        chosen_accuracy=accuracy,
        chosen_loss=scores.base_loss,
        engine=scores.engine,
        seconds=seconds,
    )


def _record(job: Job, run: Journal[Step], before: MaskSet, *, drc: int, **decision: Any) -> Step:
    """The record of the next step; the net is as it is after the removal."""
    after = masks(job.problem.net)
    return Step(
        number=len(run.history) + 1,
        before=before.count(),
        after=after.count(),
        drc=drc,
        returned=after.count() - before.count() + drc,
        cost=job.cost(),
        sites=list(after.counts().values()),
        unit=job.problem.unit,
        **decision,
    )


def _check_unchanged(now: MaskSet, expected: MaskSet) -> None:
    """Refuse masks that were changed between the removal and the end of a step's training."""
    changed = (now.bits != expected.bits).nonzero().flatten()
    if len(changed):
        site, position = now.locate(int(changed[0]))
        raise RuntimeError(
            f"the training changed the masks: {len(changed)} bits, the first at site "
            f"{site.name!r}, position {position}; training may change weights only"
        )
