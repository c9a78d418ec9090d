"""Algorithm 1 as a generator of steps: propose, score, choose, remove, train, save.

    for step in descend(job, run):
        ...                        # train the net: the ReLUs of this step are removed

Each step draws up to RT hypotheses of DRC kept ReLUs, takes the first whose accuracy on the train
set drops by less than ADT percentage points, or else the one that drops least.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastbcd.descent.goals import Goal
from fastbcd.descent.job import Job
from fastbcd.descent.limits import counts_of
from fastbcd.descent.proposals import draws
from fastbcd.descent.returns import to_return
from fastbcd.descent.schedules import size_of
from fastbcd.masking.masks import MaskSet, masks, set_masks
from fastbcd.runs.journal import Journal
from fastbcd.runs.step import Step, timed
from fastbcd.runtime.show import say
from fastbcd.scoring.choose import Choice, choose
from fastbcd.scoring.score import score

MARGINS = "confidence/margins"  # in the saved state, beside the tensors of the net


def descend(job: Job, run: Journal[Step], *, progress: bool = False) -> Iterator[Step]:
    """The steps until the budget is met. Each is finished when the next one is asked for."""
    job = job.at(run.start)
    net = job.problem.net
    while not job.met():
        seconds = {"propose": 0.0, "score": 0.0}
        kept = masks(net).copy()
        goal = _goal(job, run, kept)
        choice = _choose(job, run, goal, seconds)
        set_masks(net, kept.without(choice.removal))
        returned = to_return(net, job.problem.scored, job.limits, loss=job.problem.criterion.loss)
        set_masks(net, masks(net).including(returned))
        step = _step(job, len(run.history) + 1, kept, choice, seconds)
        yield from _trained(job, run, step, choice.margins, progress)


def rests(job: Job, run: Journal[Step], *, progress: bool = False) -> Iterator[Step]:
    """Steps at the budget, which only train, until the epochs of the job are spent."""
    job = job.at(run.start)
    while not job.over(run.history):
        step = _rest(job, len(run.history) + 1)
        yield from _trained(job, run, step, run.extra.get(MARGINS), progress)


def _goal(job: Job, run: Journal[Step], kept: MaskSet) -> Goal:
    """What the next step must reach."""
    size = size_of(job.search.drc, kept.count(), run.history)
    begin = (run.start.value, run.start.sites)
    return Goal(kept, job.limits.step(counts_of(kept), size, begin), job.limits)


def _choose(job: Job, run: Journal[Step], goal: Goal, seconds: dict[str, float]) -> Choice:
    """Try hypotheses until one is accepted or RT are rejected."""
    search = job.search
    problem = job.problem
    number = len(run.history) + 1
    with timed(seconds, "score"):
        with timed(seconds, "propose"):
            draw = draws(
                job.proposal, problem.net, problem.scored, goal, seed=search.seed, step=number
            )

        def hypothesis(trial: int) -> Tensor:
            with timed(seconds, "propose"):
                return draw(trial)

        choice = choose(
            problem.net,
            map(hypothesis, range(job.trials)),
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
    seconds["score"] -= seconds["propose"]
    return choice


def _step(
    job: Job, number: int, before: MaskSet, choice: Choice, seconds: dict[str, float]
) -> Step:
    """The record of a step whose ReLUs are removed."""
    after = masks(job.problem.net)
    drc = len(choice.removal)
    return Step(
        number=number,
        before=before.count(),
        after=after.count(),
        drc=drc,
        returned=after.count() - before.count() + drc,
        cost=job.cost(),
        tried=choice.number + 1 if choice.accepted else job.trials,
        chosen=choice.number,
        accepted=choice.accepted,
        drops=dict(sorted(choice.drops.items())),
        base_accuracy=choice.base_percent,
        base_loss=choice.base_loss,
        chosen_accuracy=choice.percent,
        chosen_loss=choice.loss,
        engine=choice.engine,
        sites=list(after.counts().values()),
        images=choice.seen,
        interval=choice.interval,
        seconds=seconds,
        unit=job.problem.unit,
    )


def _rest(job: Job, number: int) -> Step:
    """The record of a step that removes nothing."""
    seconds: dict[str, float] = {}
    search = job.search
    problem = job.problem
    kept = masks(problem.net)
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    with timed(seconds, "score"):
        scores = score(
            problem.net, nothing, problem.scored, job.engine, metric=search.metric, loss=search.loss
        )
    accuracy = problem.criterion.percent(scores.base_value)
    return Step(
        number=number,
        before=kept.count(),
        after=kept.count(),
        drc=0,
        cost=job.cost(),
        tried=0,
        chosen=0,
        accepted=True,
        drops={},
        base_accuracy=accuracy,
        base_loss=scores.base_loss,
        chosen_accuracy=accuracy,
        chosen_loss=scores.base_loss,
        engine=scores.engine,
        sites=list(kept.counts().values()),
        seconds=seconds,
        unit=problem.unit,
    )


def _trained(
    job: Job, run: Journal[Step], step: Step, margins: Tensor | None, progress: bool
) -> Iterator[Step]:
    """Yield the step, to be trained; then test it if that is due, and make it the last finished."""
    net = job.problem.net
    removed = masks(net).copy()
    with timed(step.seconds, "finetune"):
        yield step
    _check_unchanged(masks(net), removed)
    if job.over([*run.history, step]) or step.number % job.search.test_every == 0:
        with timed(step.seconds, "test"):
            step.test_accuracy = job.problem.accuracy()
    run.finish(step, {} if margins is None else {MARGINS: margins})
    if progress:
        say(str(step))


def _check_unchanged(now: MaskSet, expected: MaskSet) -> None:
    """Refuse masks that were changed between the removal and the end of a step's training."""
    changed = (now.bits != expected.bits).nonzero().flatten()
    if len(changed):
        site, position = now.locate(int(changed[0]))
        raise RuntimeError(
            f"the training changed the masks: {len(changed)} bits, the first at site "
            f"{site.name!r}, position {position}; training may change weights only"
        )
