"""Epochs of a run: each is seeded by its number, recorded, and saved in the run's journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastbcd.data.images import ImageData
from fastbcd.runs.journal import Journal
from fastbcd.runs.step import Epoch, timed
from fastbcd.runtime.show import bar, say
from fastbcd.scoring.accuracy import accuracy
from fastbcd.training.loop import Session, Trainer
from fastbcd.training.repeat import repeatable


@contextmanager
def recorded(
    session: Session, record: Epoch, *, test: ImageData | None, progress: bool
) -> Iterator[Any]:
    """Around an epoch: completes its record. Yields a bar of its batches."""
    trainer = session.trainer
    shown = bar(progress, total=len(trainer.sizes), desc=record.phase, leave=False)
    algorithms = repeatable(
        trainer.data.device, trainer.seed, record.epoch or 0, trainer.settings.fast
    )
    with timed(record.seconds, "epoch"), shown, algorithms:
        yield shown
    if test is not None:
        record.test_accuracy = accuracy(trainer.model, test)
    if progress:
        say(str(record))


def train_epochs(
    trainer: Trainer,
    run: Journal[Epoch],
    phase: str,
    rates: Sequence[float],
    *,
    step: int,
    test: ImageData | None,
    progress: bool,
) -> None:
    """The epochs of a phase that are left, one for each learning rate.

    The last one is saved after the session, with the net's own dtype and without an optimizer.
    """
    with trainer.session() as session:
        run.undo()  # saved weights are those of a session, which may be wider than the net's
        session.load_optimizer(run.extra)
        first = sum(record.phase == phase for record in run.history)
        for epoch in range(first, len(rates)):
            record = Epoch(
                number=len(run.history) + 1, epoch=epoch, phase=phase, lr=rates[epoch]
            )
            with recorded(session, record, test=test, progress=progress) as shown:
                record.loss = session.epoch(epoch, rates[epoch], step=step, bar=shown)
            if epoch + 1 < len(rates):
                run.finish(record, session.optimizer_state())
    if first < len(rates):
        run.finish(record)
