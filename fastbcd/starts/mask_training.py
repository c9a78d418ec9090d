"""What starting points have in common: train masks, decide on the bits, fine-tune, save.

A `Method` says how an epoch trains and which ReLUs are kept. With a run directory every epoch is
saved with the optimizer's state, and the same call resumes from there: the result is the same as
without the interruption.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from fastbcd.descent.budget import Budget, Limits, check_reducible, counts_of, limits_of
from fastbcd.descent.problem import Problem
from fastbcd.masking.masks import MaskSet, masks, set_masks
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.config import Config
from fastbcd.runs.journal import Journal, journal
from fastbcd.runs.step import Epoch, Start
from fastbcd.runtime.settings import described
from fastbcd.runtime.validate import check_whole
from fastbcd.scoring.accuracy import accuracy
from fastbcd.scoring.metric import Criterion
from fastbcd.starts.method import MaskEpoch, MaskTraining, Method
from fastbcd.training.checks import check_same_sites, check_settings, check_trainable
from fastbcd.training.epochs import recorded, train_epochs
from fastbcd.training.loop import Trainer
from fastbcd.training.rates import cosine
from fastbcd.training.settings import Finetune
from fastbcd.training.teacher import TeacherLogits

# The phases of a run; two of them are one record each.
MASKS = "masks"
DECIDED = "decided"
FINETUNE = "finetune"
FINAL = "final"


@dataclass
class StartingPoint:
    """A net at its budget, and how it got there.

    history: one record per epoch of the mask training; its notes have what the paper plots:
    "decrease", "iou" with the masks of the epoch before, "lambda", ….
    accuracy: percent on `measured_on` of the net with trained masks ("trained"), right after they
    are cut to bits ("thresholded"), and after the fine-tune ("final").
    finetune: one record per epoch of the fine-tune.

    >>> masks = fastbcd.MaskSet.full({"relu": (8,)})
    >>> StartingPoint(nn.Identity(), masks, [], {"final": 78.45}, "test")
    StartingPoint(8 ReLUs after 0 epochs; on the test set: final 78.45 %)
    """

    model: nn.Module
    masks: MaskSet
    history: list[Epoch]
    accuracy: dict[str, float]
    measured_on: str
    finetune: list[Epoch] = field(default_factory=list)

    def __repr__(self) -> str:
        steps = ", ".join(
            f"{name} {value:.2f} %" for name, value in self.accuracy.items()
        )
        kept = f"{self.masks.count():,} ReLUs after {len(self.history)} epochs"
        return f"StartingPoint({kept}; on the {self.measured_on} set: {steps})"


class Task(NamedTuple):
    """What is trained, by which method, to which limits; checked."""

    method: type[Method]
    problem: Problem
    limits: Limits
    chosen: MaskTraining
    tuning: Finetune

    def trainer(
        self, model: nn.Module, settings: Finetune, teacher: TeacherLogits | None
    ) -> Trainer:
        """What trains a model, with or without masks."""
        # The optimizer's fused kernels would round in another way than those of published code.
        return Trainer(
            model,
            self.problem.train,
            settings,
            teacher,
            seed=self.chosen.seed,
            fused_optimizer=False,
        )

    def accuracy(self, model: nn.Module) -> float:
        """Percent on the test set, or on the train set if there is none."""
        return accuracy(model, self.problem.test or self.problem.train)


def train_masks(
    method: type[Method],
    net: nn.Module,
    data: Any,
    budget: int | Budget,
    chosen: MaskTraining,
) -> StartingPoint:
    """Train the masks, cut them to bits, fine-tune. After an exception the net is as before."""
    task = _task(method, net, data, budget, chosen)
    net = task.problem.net
    test = task.problem.test
    about = chosen.describe() | {
        "budget": described(budget),
        "teacher": snapshots.weights_mark(chosen.teacher),
    }
    config = Config.of(method.name, about, net, data=task.problem.train, test=test)
    opened = journal(
        config,
        net,
        Epoch,
        begin=Start,
        over=lambda history: bool(_phase(history, FINAL)),
        run_dir=chosen.run_dir,
        resume=chosen.resume,
    )
    before = snapshots.take(net)
    try:
        with opened as run:
            if not run.over(run.history):
                _train(task, run)
    except BaseException:
        snapshots.restore(net, before)
        raise
    return StartingPoint(
        model=net,
        masks=masks(net),
        history=_phase(run.history, MASKS),
        accuracy=run.history[-1].accuracy or {},
        measured_on="test" if test else "train",
        finetune=_phase(run.history, FINETUNE),
    )


def _task(
    method: type[Method],
    net: nn.Module,
    data: Any,
    budget: int | Budget,
    chosen: MaskTraining,
) -> Task:
    if not isinstance(net, nn.Module):
        raise TypeError(f"net is {net!r:.80}; give a torch.nn.Module")
    net = method.prepare(net, chosen)
    check_reducible(budget, net)
    problem = Problem(net, data, chosen.test, Criterion(), None)
    limits = limits_of(budget, net)
    counts = counts_of(masks(net))
    if isinstance(budget, Budget) and limits.met(counts):
        raise ValueError(
            f"the net as it is costs {limits.value(counts):g}: {budget} is met"
        )
    tuning = chosen.finetune or Finetune(epochs=0)
    check_whole("finetune.epochs", tuning.epochs, 0)
    for settings in (tuning, replace(tuning, batch_size=chosen.batch_size)):
        check_settings(settings, problem.train)
    check_trainable(net, problem.train, tuning, chosen.teacher)
    if method.matched and chosen.teacher is not None:
        check_same_sites(net, problem.train, chosen.teacher)
    return Task(method, problem, limits, chosen, tuning)


def _train(task: Task, run: Journal[Epoch]) -> None:
    """What is left of the run."""
    net = task.problem.net
    # The default teacher is the net at the start of the run, on every rank.
    snapshots.restore(net, run.start_tensors())
    teacher: TeacherLogits | None = None
    matched = task.method.matched
    if task.tuning.distill or task.tuning.mismatch or matched:
        dense = task.chosen.teacher
        if dense is None:
            dense = net
        teacher = TeacherLogits(dense, task.problem.train, task.tuning, matched=matched)
    if not _phase(run.history, DECIDED):
        _train_masks(task, run, teacher)
    epochs = int(task.tuning.epochs)
    train_epochs(
        task.trainer(net, task.tuning, teacher),
        run,
        FINETUNE,
        [cosine(task.tuning.lr, epoch, epochs) for epoch in range(epochs)],
        step=1,
        test=task.problem.test,
        progress=task.chosen.progress,
    )
    (decided,) = _phase(run.history, DECIDED)
    reached = (decided.accuracy or {}) | {"final": task.accuracy(net)}
    _finish(run, FINAL, net, reached)


def _train_masks(
    task: Task, run: Journal[Epoch], teacher: TeacherLogits | None
) -> None:
    """Train the masks to the end and write the bits into the net."""
    net = task.problem.net
    chosen = task.chosen
    method = task.method(net, task.problem.train, task.limits, chosen)
    settings = replace(task.tuning, **method.optimizer, batch_size=chosen.batch_size)
    trainer = task.trainer(method.model, settings, teacher)
    before = method.start
    with trainer.session() as session:
        if run.history:
            session.load(run.extra)
            before = method.masks()
        while not method.done(run.history):
            epoch = len(run.history)
            record = Epoch(number=epoch + 1, epoch=epoch, phase=MASKS)
            whole = recorded(
                session, record, test=task.problem.test, progress=chosen.progress
            )
            with whole as bar:
                method.train(MaskEpoch(session, record, run.history, bar))
                before = _compared(record, before, method.masks())
            run.finish(record, session.state())
        trained = task.accuracy(trainer.model)
    count = method.masks().count()
    if method.advice and count > method.slack * method.budget:
        warnings.warn(
            f"after {len(run.history)} epochs {count:,} ReLUs are on, more than the budget of "
            f"{method.budget:,}: {method.advice}",
            RuntimeWarning,
            stacklevel=6,
        )
    set_masks(net, method.decide())
    reached = {"trained": trained, "thresholded": task.accuracy(net)}
    _finish(run, DECIDED, net, reached)


def _finish(
    run: Journal[Epoch], phase: str, net: nn.Module, reached: dict[str, float]
) -> None:
    """The one record of a phase in which nothing is trained."""
    number = len(run.history) + 1
    count = masks(net).count()
    run.finish(Epoch(number=number, phase=phase, count=count, accuracy=reached))


def _compared(record: Epoch, before: MaskSet, after: MaskSet) -> MaskSet:
    """Note how the masks after an epoch differ from those before it; returns the former."""
    record.count = after.count()
    record.notes["decrease"] = before.count() - after.count()
    if record.epoch and before.count() and after.count():
        record.notes["iou"] = after.iou(before)
    return after


def _phase(history: Sequence[Epoch], phase: str) -> list[Epoch]:
    return [record for record in history if record.phase == phase]
