"""linearize: from a trained model to a net with a budget of ReLUs, in a stated number of epochs.

    run = fastbcd.linearize(model, train, 20_000, epochs=60, test=test, run_dir="runs/20k")

`convert`, the steps of `bcd` and `Finetune`, with the settings below. On the way down a step
removes about the same share of the ReLUs as every other, and trains for a part of an epoch. What is
left of the epochs is the final fine-tune, in steps of one epoch at the budget. A step is saved when
it ends, whichever of the two it is.

    runs = fastbcd.linearize(model, train, [100_000, 50_000, 20_000], epochs=60)

Several budgets are one way down: the run of each starts from the net of the one before it, and
each has an equal part of the epochs.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

from torch import nn

from fastbcd.data.for_net import data_for
from fastbcd.data.images import ImageData
from fastbcd.descent.bcd import Run
from fastbcd.descent.blocks import Blocks
from fastbcd.descent.budget import Budget, check_reducible, counts_of, limits_of
from fastbcd.descent.goals import Goal
from fastbcd.descent.job import Job, Search
from fastbcd.descent.plan import show_plan, watched
from fastbcd.descent.problem import check_net
from fastbcd.descent.proposals import Saliency
from fastbcd.descent.schedules import Shares
from fastbcd.descent.tuning import Callback
from fastbcd.masking.activations import REPLACEMENTS, MaskedActivation
from fastbcd.masking.convert import convert
from fastbcd.masking.fitted import to_line, to_poly
from fastbcd.masking.masks import MaskSet, mask_modules, masks, set_masks
from fastbcd.runs.journal import Journal
from fastbcd.runs.step import Step
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.settings import fields_in, setting, with_settings
from fastbcd.training.rates import cosine
from fastbcd.training.settings import Finetune

# What it chooses, and the measurement behind it. By benchmarks/settings.py: ResNet-20 on CIFAR-10,
# 8,000 ReLUs, 12 epochs of 5,000 images, accuracy on 5,000 train images that no arm trains on, two
# seeds each: linearize has 78.1 and 78.4 %. What lost is in benchmarks/RESULTS.md.
# Share of the epochs on the way down. 0.4: 78.1 and 78.1, 0.8: 75.8 and 76.2.
DOWN = 0.6
PARTS = 4  # steps per epoch there; 1: 78.3 and 78.5, 2: 78.0 and 77.4, 8: 76.8 and 76.9
RT = 4  # hypotheses of a step; one: 78.5 and 77.6
# The rest: 15 epochs of 2,000 images, accuracy on 8,000 train images that no arm trains on, with
# one greedy hypothesis per step and one optimizer for the whole run. Seeds of one setting differ by
# up to 2 points.
# Constant on the way down, by replacement: lines do less damage than the identity, and a small rate
# keeps more of what the model has learned. Lines: 0.01 79.2 % at 20,000 ReLUs and 72.5 at 8,000,
# 0.003 83.7 and 74.4, 0.001 84.9 and 74.1. The identity at 20,000: 0.02 69.3, 0.01 and 0.005 76.9,
# 0.001 growing to 0.01 75.1. The model was trained on these images too, which favours small rates.
LR = {"line": 0.003, "poly": 0.01, "identity": 0.01}
# A limit on the norm of the gradient, which is 10 to 40 in these runs: a batch with large squares
# has a far longer one. Quadratics, 20,000 ReLUs: lr 0.01 89.2 %, 0.003 89.0.
CLIP = {"line": 0.0, "poly": 5.0, "identity": 0.0}
# Proposals are distilled. 8,000 ReLUs, two seeds: 67.8 and 66.6 % by random views of 500 images,
# 67.3 by the images as they are (one seed); by the cross-entropy alone 66.2 and 64.4.
# 500 and 1,000 images are equal. With 500, and 5,000 train images, a step proposes in 1.4 s,
# decides in 2 s and trains for 6 s.
SAMPLES = 500
# Removed ReLUs become lines. 8,000 ReLUs: lines 72.5 and 72.2 % (two seeds), the identity 67.0,
# lines that start as the identity 68.3. 20,000: lines 79.2, the identity 76.9, all with lr 0.01.
LINE = "line"
LAST = 1e-3  # what is left before the last step of a way down to nothing, a share
BATCHES = 200  # of an epoch, at least
SMALLEST = 25  # images of a batch
LARGEST = 128
TESTS = 10  # of a run


@dataclass(frozen=True, kw_only=True)
class Linearization(Search):
    """What `linearize` decides by itself, beside the settings of `Finetune`."""

    epochs: int = setting(
        60,
        "of training in all, over all budgets: 60 % of them on the way down, a quarter of one per "
        "step",
        least=1,
        recorded=False,
    )
    replacement: str = setting(
        LINE,
        'what a removed ReLU becomes: "line", c1*x + c0 for each channel, fitted to ReLU and then '
        'learned; "identity", as in the paper; "poly", a quadratic, fitted and then learned',
        choices=REPLACEMENTS,
        recorded=False,
    )
    lr: float | None = setting(
        None,
        "the learning rate on the way down; it then falls to 0 on a cosine. None: 0.003 for lines, "
        "0.01 for others",
        above=0,
        recorded=False,
    )
    clip: float | None = setting(
        None,
        "the largest norm of the gradient, 0: no limit. None: 5 for quadratics, 0 for others",
        least=0,
        recorded=False,
    )
    batch_size: int | None = setting(
        None,
        "None: 25 for up to 5,000 images, up to 128 for more",
        least=1,
        recorded=False,
    )
    rt: int = setting(RT, "hypotheses that a step tries at most", least=1)
    samples: int | None = setting(
        None,
        "propose and score on the first n train images; None: on 500 at most",
        least=1,
    )

    test_every: int | None = setting(  # type: ignore[assignment]
        None,
        "measure the test accuracy after every n steps, and after the last one; None: about ten "
        "times in a run",
        least=1,
        recorded=False,
    )

    def for_images(self, count: int) -> Linearization:
        """With values in place of None."""
        clip = self.clip
        if clip is None:
            clip = CLIP[self.replacement]
        batch_size = self.batch_size or min(LARGEST, max(SMALLEST, count // BATCHES))
        filled = replace(
            self,
            lr=self.lr or LR[self.replacement],
            clip=clip,
            batch_size=batch_size,
            samples=self.samples or min(SAMPLES, count),
        )
        steps = self.epochs * (DOWN * filled.parts(count) + 1 - DOWN)
        return replace(
            filled, test_every=self.test_every or max(1, round(steps / TESTS))
        )

    def parts(self, count: int) -> int:
        """Steps per epoch on the way down."""
        return max(1, min(PARTS, count // (self.batch_size or 1)))


@overload
def linearize(
    model: nn.Module, train: Any, budget: int | Budget, **settings: Any
) -> Run: ...


@overload
def linearize(
    model: nn.Module, train: Any, budget: Sequence[int | Budget], **settings: Any
) -> list[Run]: ...


@with_settings(Linearization, Finetune, without=("drc", "proposal", "finetune_when"))
def linearize(
    model: nn.Module,
    train: Any,
    budget: int | Budget | Sequence[int | Budget],
    *,
    test: Any = None,
    start: Any = None,
    teacher: nn.Module | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    dry_run: bool = False,
    **settings: Any,
) -> Run | list[Run]:
    """A copy of the model that keeps exactly `budget` ReLUs, fine-tuned, after `epochs` epochs.

    Args:
        model: a trained network that `convert` takes, or one that has masks. It is not changed.
        train, test: the train set, and the test set if accuracy is to be measured, as in `bcd`.
        budget: ReLUs to keep, or a `fastbcd.private.Target`. Of a list, the largest first, each
            has a run of its own, which starts from the one before it; the runs are returned.
        start: where to start from, if not at the model: a MaskSet, or a net with masks and its
            own weights, as such or as the result of a starting point (`snl`, `autorep`, …), of
            `bcd` or of `load_run`. One that is at the budget is only trained.
        teacher: to distil from; None: the model. distill=0 switches the distillation off.
        run_dir, resume: as in `bcd`. Of a list, each budget has a folder of its own in run_dir.
        progress: print the plan, one line per step, and a bar with the time that is left.
        callbacks: functions that rank 0 calls with every finished `Step`: for your own logs.
        dry_run: print the plan with the expected minutes, and return; nothing is removed.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> run = linearize(model, data, 2, epochs=5, padding=0, progress=False)
    >>> run.masks.count(), [step.after for step in run.history]
    (2, [6, 5, 4, 3, 2, 2, 2, 2])
    >>> runs = linearize(model, data, [4, 2], epochs=5, padding=0, progress=False)
    >>> [run.masks.count() for run in runs]
    [4, 2]
    """
    check_net("model", model)
    data = data_for(model, train)
    if isinstance(budget, Sequence):
        how = {"test": test, "teacher": teacher, "resume": resume, "progress": progress}
        how |= {"callbacks": callbacks, "dry_run": dry_run, **settings}
        return _one_way(model, data, budget, start=start, run_dir=run_dir, **how)
    chosen = Linearization(**fields_in(Linearization, settings)).for_images(len(data))
    net = _net(model, data, start, chosen.replacement)
    check_reducible(budget, net)
    parts = chosen.parts(len(data))
    tuned = settings | vars(chosen) | {"epochs": 1 / parts}
    finetune = Finetune(**fields_in(Finetune, tuned))
    distilled = finetune.distill > 0
    if teacher is None and distilled:
        teacher = model
    job = Job.of(
        net,
        data,
        budget,
        _search(chosen, budget, net, parts, distilled=distilled),
        test=test,
        finetune=finetune,
        teacher=teacher,
        progress=progress,
        callbacks=callbacks,
        epochs=chosen.epochs,
    )
    if dry_run:
        show_plan(job, *job.peek(run_dir))
        return Run(net, masks(net), [])
    with job.journal(run_dir, resume) as run:
        _spend(job, run, chosen, progress)
    return Run(net, masks(net), run.history)


def _spend(job: Job, run: Journal[Step], chosen: Linearization, progress: bool) -> None:
    """Take the steps of a run that are left, each with its part of the epochs."""
    parts = chosen.parts(len(job.problem.train))
    batches = job.training.batches
    for step in watched(job, run, progress):
        left = job.epochs_left(run.history)
        epochs, lr = _portion(chosen, step, run.history, parts, batches)
        if left:
            job.training(step, epochs=min(left, epochs), rates=[lr])


def _one_way(
    model: nn.Module,
    data: ImageData,
    budgets: Sequence[int | Budget],
    *,
    start: Any,
    run_dir: str | os.PathLike[str] | None,
    **how: Any,
) -> list[Run]:
    """A run for each budget, which starts from the one before it; how: of `linearize`."""
    chosen = Linearization(**fields_in(Linearization, how))
    net = _net(model, data, start, chosen.replacement)
    _check_budgets(budgets, net, chosen)
    runs: list[Run] = []
    for number, budget in enumerate(budgets):
        how["epochs"] = _part(chosen.epochs, number, len(budgets))
        folder = None if run_dir is None else Path(run_dir) / _name(budget)
        run = linearize(model, data, budget, start=start, run_dir=folder, **how)
        runs.append(run)
        start = run
        how["resume"] = "auto"  # an interrupted way has no runs of later budgets
        if how["dry_run"]:
            start = _within(budget, run.model, chosen.max_sites)
    return runs


def _check_budgets(
    budgets: Sequence[int | Budget], net: nn.Module, chosen: Linearization
) -> None:
    """Refuse budgets that the net cannot meet one after the other, in the epochs given."""
    for budget in budgets:
        check_reducible(budget, net)
        limits_of(budget, net, chosen.max_sites)
    counts = [budget for budget in budgets if not isinstance(budget, Budget)]
    if any(first <= second for first, second in pairwise(counts)):
        raise ValueError(f"budget={counts}; give the largest first, and each once")
    if not 1 <= len(budgets) <= chosen.epochs:
        raise ValueError(
            f"{len(budgets)} budgets in epochs={chosen.epochs}; each needs one at least"
        )


def _part(epochs: int, number: int, count: int) -> int:
    """The epochs of one of `count` budgets.

    >>> [_part(10, number, 4) for number in range(4)]
    [2, 3, 2, 3]
    """
    return epochs * (number + 1) // count - epochs * number // count


def _name(budget: int | Budget) -> str:
    """The folder of one of several budgets.

    >>> _name(20_000), _name(fastbcd.private.Target(seconds=1.5))
    ('20000', 'Target-seconds-1.5-protocol-crypten-bandwidth-1Gbit-rtt-1ms')
    """
    text = str(Budget.of(budget)).replace(",", "")
    return re.sub(r"[^\w.]+", "-", text).strip("-")


def _within(budget: int | Budget, net: nn.Module, max_sites: int | None) -> MaskSet:
    """Masks of the net that meet the budget, whichever ReLUs they keep: for a plan."""
    kept = masks(net)
    limits = limits_of(budget, net, max_sites)
    ids = kept.bits.nonzero().flatten()
    return kept.without(Goal(kept, limits, limits).fit(ids, ids[:0]))


def _portion(
    chosen: Linearization, step: Step, history: Sequence[Step], parts: int, batches: int
) -> tuple[float, float]:
    """The epochs of a step, in whole batches, and its learning rate.

    On the way down a step ends where a part of an epoch does, and the rate is constant; then it
    ends where an epoch does, and the rate is on a cosine.
    """
    lr = chosen.lr or 0.0
    spent = sum(earlier.epochs or 0.0 for earlier in history)
    if not step.drc:
        down = sum(earlier.epochs or 0.0 for earlier in history if earlier.drc)
        lr = cosine(lr, spent - down, chosen.epochs - down)
        parts = 1
    now = round(spent * batches)
    part = math.ceil((now + 1) * parts / batches)
    return (part * batches // parts - now) / batches, lr


def _search(
    chosen: Linearization,
    budget: int | Budget,
    net: nn.Module,
    parts: int,
    *,
    distilled: bool,
) -> Search:
    """The settings of the search. Every step leaves the same share of what the net can save."""
    limits = limits_of(budget, net, chosen.max_sites)
    least = limits.least()
    above = max(limits.value(counts_of(masks(net))) - least, 1e-9)
    left = min(1.0, max((limits.most - least) / above, LAST))
    steps = max(1, round(DOWN * chosen.epochs * parts))
    kind = Saliency
    if isinstance(budget, Budget) or chosen.max_sites is not None:
        kind = Blocks
    drc = Shares(1 - left ** (1 / steps), steps)
    return replace(chosen, drc=drc, proposal=kind(distilled=distilled))


def _net(model: nn.Module, data: ImageData, start: Any, replacement: str) -> nn.Module:
    """A copy of the model, or of the start's net, with masks and the replacement."""
    source = model
    if start is not None and not isinstance(start, MaskSet):
        source = getattr(start, "model", start)
    check_net("start", source)
    if any(isinstance(module, MaskedActivation) for module in source.modules()):
        net = copy.deepcopy(source)
    else:
        example = next(data.batches(2, dtype=dtype_of(source)))[0]
        net = convert(source, example)
    if replacement == "line":
        net = to_line(net, data)
    if replacement == "poly":
        net = to_poly(net, data)
    if isinstance(start, MaskSet):
        set_masks(net, start)
    for site, act in mask_modules(net).items():
        # The net had a later one before.
        if type(act) is not REPLACEMENTS[replacement]:
            raise ValueError(
                f"site {site!r} is a {type(act).__name__}; pass its replacement, not "
                f"{replacement!r}"
            )
    return net
