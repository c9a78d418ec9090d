"""bcd: Block Coordinate Descent, Algorithm 1 of the paper. The search itself is in search.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from fastbcd.descent.budget import Budget
from fastbcd.descent.job import Job, Search
from fastbcd.descent.plan import show_plan, watched
from fastbcd.descent.tuning import Callback, Training
from fastbcd.masking.masks import MaskSet, masks
from fastbcd.runs.curve import as_html
from fastbcd.runs.step import Step
from fastbcd.runtime.settings import with_settings
from fastbcd.training.settings import Finetune

PAPER = Finetune()


class Run(NamedTuple):
    """What `bcd` returns: the given net at its budget, its masks, and one record per step.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4), nn.Linear(4, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> run = fastbcd.bcd(net, data, budget=1, drc=2, finetune=None)
    >>> run.model is net, run.masks.count(), len(run.history)
    (True, 1, 2)
    >>> run  # doctest: +ELLIPSIS
    Run(1 of 4 ReLUs kept in 1 sites after 2 steps, train ... %)
    """

    model: nn.Module
    masks: MaskSet
    history: list[Step]

    def __repr__(self) -> str:
        kept = f"{self.masks.count():,} of {self.masks.total:,} ReLUs kept"
        sites = len(self.masks.sites)
        text = f"{kept} in {sites} sites after {len(self.history)} steps"
        for last in self.history[-1:]:
            text += f", train {last.chosen_accuracy:.2f}{last.unit}"
            if last.test_accuracy is not None:
                text += f", test {last.test_accuracy:.2f}{last.unit}"
        return f"Run({text})"

    def _repr_html_(self) -> str:
        return as_html(repr(self), self.history)


@with_settings(Search)
def bcd(
    net: nn.Module,
    data: Any,
    budget: int | Budget,
    *,
    finetune: Finetune | Callable[[nn.Module, Step], Any] | None = PAPER,
    teacher: nn.Module | None = None,
    test: Any = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    dry_run: bool = False,
    **search: Any,
) -> Run:
    """Remove ReLUs from the net, in place, until exactly `budget` are kept.

    Args:
        net: with masked activations, from `convert` or placed by hand.
        data: the train set, for scoring and fine-tuning: ImageData, (images, labels), a Dataset
            or a DataLoader.
        budget: ReLUs to keep, or a `fastbcd.private.Target`: seconds, bytes or rounds of private
            inference. The cost ends at or below the target, as close to it as one ReLU allows: if
            an emptied site takes it below, removed ReLUs of sites in use return, those of largest
            first-order gain first, as far as there are any.
        finetune: settings, None, or your own f(net, step) that trains in place. It is called with
            torch's generator seeded by (seed, step) and may return {"loss": ...}.
        teacher: a net to distil from, with `Finetune`.
        test: the test set, if accuracy is to be measured.
        run_dir: where every finished step is saved. The same call resumes from there, also on
            another device or number of ranks.
        resume: "auto"; "must" (True) refuses a directory without a run, "never" (False) one that
            is not empty.
        progress: show bars and one line per step.
        callbacks: functions that rank 0 calls with every finished `Step`, and with the `Epoch`s
            of a fine-tune of more than one epoch: for your own logs.
        dry_run: print the steps, epochs and expected minutes, and return; nothing is removed.

    After any exception the net is as it was at the end of the last finished step.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> run = bcd(net, data, budget=1, drc=2, rt=3, finetune=None)
    >>> run.masks.count(), [step.after for step in run.history]
    (1, [4, 2, 1])
    """
    job = Job.of(
        net,
        data,
        budget,
        Search(**search),
        test=test,
        finetune=finetune,
        teacher=teacher,
        progress=progress,
        callbacks=callbacks,
    )
    if dry_run:
        show_plan(job, *job.peek(run_dir))
        return Run(net, masks(net), [])
    with job.journal(run_dir, resume) as run:
        for step in watched(job, run, progress):
            if job.search.finetune_when == "every_step" or not step.accepted:
                job.training(step)
    return Run(net, masks(net), run.history)


@with_settings(Search, without=("finetune_when",))
def steps(
    net: nn.Module,
    data: Any,
    budget: int | Budget,
    *,
    test: Any = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    progress: bool = False,
    **search: Any,
) -> Iterator[Step]:
    """The steps of `bcd`, with your own training in the loop's body.

    In the body the step's ReLUs are already removed. After it the test accuracy is measured and
    the step is saved; a step.train_loss that the body sets is recorded. Leaving the loop within
    the body (break, an exception) undoes the step. The body may change the weights, not the masks.
    Arguments are those of `bcd`.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> for step in steps(net, data, budget=2, drc=3, rt=3):
    ...     print(step.number, step.before, step.after)
    1 6 3
    2 3 2
    """
    body = Training("the loop's body", epochs=None)
    job = Job.of(net, data, budget, Search(**search), test=test, finetune=body)
    return _steps(job, run_dir, resume, progress)


def _steps(
    job: Job, run_dir: Any, resume: str | bool, progress: bool
) -> Iterator[Step]:
    with job.journal(run_dir, resume) as run:
        yield from watched(job, run, progress)
