"""linearize: from a trained model to a net with a budget of ReLUs, in a stated number of epochs.

    run = fastbcd.linearize(model, train, 20_000, epochs=60, test=test, run_dir="runs/20k")

`convert`, the steps of `bcd` and `Finetune`, with the settings below. On the way down a step
removes about the same share of the ReLUs as every other, and trains for a part of an epoch. What is
left of the epochs is the final fine-tune, in steps of one epoch at the budget. A step is saved when
it ends, whichever of the two it is.
"""

from __future__ import annotations

import copy
import math
import os
from contextlib import closing
from typing import Any

from torch import nn
from tqdm import tqdm

from fastbcd.data.for_net import data_for
from fastbcd.descent.bcd import Descent, Run
from fastbcd.descent.budget import Budget, limits_of
from fastbcd.descent.limits import counts_of
from fastbcd.descent.proposals import Blocks, Saliency
from fastbcd.descent.schedules import Shares
from fastbcd.masking.activations import REPLACEMENTS
from fastbcd.masking.convert import convert
from fastbcd.masking.fitted import to_line, to_poly
from fastbcd.masking.masks import MaskSet, mask_modules, masks, set_masks
from fastbcd.runtime import ranks
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.validate import check_choice, check_number, check_whole
from fastbcd.scoring.engine import Engine
from fastbcd.scoring.metric import Loss, Metric
from fastbcd.training.rates import cosine
from fastbcd.training.settings import Finetune

# What it chooses, and the measurement behind it. By benchmarks/settings.py: ResNet-20 on CIFAR-10,
# 8,000 ReLUs, 12 epochs of 5,000 images, accuracy on 5,000 train images that no arm trains on, two
# seeds each: linearize has 78.1 and 78.4 %. What lost is in benchmarks/RESULTS.md.
DOWN = 0.6  # share of the epochs on the way down; 0.4: 78.1 and 78.1, 0.8: 75.8 and 76.2
PARTS = 4  # steps per epoch there; 1: 78.3 and 78.5, 2: 78.0 and 77.4, 8: 76.8 and 76.9
RT, ADT = 4, 0.3  # hypotheses of a step, and the accepted drop; one hypothesis: 78.5 and 77.6
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
BATCHES, SMALLEST, LARGEST = 200, 25, 128  # of an epoch at least, and the sizes of a batch

BAR = "linearize {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


def linearize(
    model: nn.Module, train: Any, budget: int | Budget, *, epochs: int = 60, test: Any = None,
    run_dir: str | os.PathLike[str] | None = None, start: Any = None,
    max_sites: int | None = None, replacement: str = LINE,
    teacher: nn.Module | None = None, lr: float | None = None, clip: float | None = None,
    batch_size: int | None = None,
    rt: int = RT, adt: float = ADT, samples: int | None = None, seed: int = 0,
    engine: str | Engine = "auto", metric: Metric | None = None, loss: Loss | None = None,
    confidence: float | None = None, test_every: int = 1, resume: str | bool = "auto",
    progress: bool = True, dry_run: bool = False, **finetune: Any,
) -> Run:  # fmt: skip
    """A copy of the model that keeps exactly `budget` ReLUs, fine-tuned, after `epochs` epochs.

    Args:
        model: a trained network that `convert` takes, or one that has masks. It is not changed.
        budget: ReLUs to keep, or a `fastbcd.private.Target`.
        train, test: as data and test of `bcd`.
        epochs: of training in all: 60 % of them on the way down, a quarter of one per step.
        start: where to start from, if not at the model: a MaskSet, or a net with masks and its
            own weights, as such or as the result of a starting point (`snl`, `autorep`, …), of
            `bcd` or of `load_run`. One that is at the budget is only trained.
        replacement: what a removed ReLU becomes: "line", c1*x + c0 for each channel, fitted to ReLU
            (`to_line`) and then learned; "identity", as in the paper; "poly", a quadratic, fitted
            (`to_poly`) and then learned.
        teacher: to distil from; None: the model. distill=0 switches the distillation off.
        lr: the learning rate on the way down; None: 0.003 for lines, 0.01 for others. It then
            falls to 0 on a cosine.
        clip: the largest norm of the gradient, 0: no limit; None: 5 for quadratics, 0 for others.
        batch_size: None: 25 for up to 5,000 images, up to 128 for more.
        samples: propose and score on the first n train images; None: on 500 at most.
        max_sites, rt, adt, seed, engine, metric, loss, confidence, test_every, run_dir, resume: as
            in `bcd`.
        progress: print the plan, one line per step, and a bar with the time that is left.
        dry_run: print the plan with the expected minutes, and return; nothing is removed.
        finetune: further fields of `Finetune`, such as padding=0, flip=False or amp.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> run = linearize(model, data, 2, epochs=5, padding=0, progress=False)
    >>> run.masks.count(), [step.after for step in run.history]
    (2, [6, 5, 4, 3, 2, 2, 2, 2])
    """
    check_whole("epochs", epochs, 1)
    check_choice("replacement", replacement, tuple(REPLACEMENTS))
    lr = LR[replacement] if lr is None else lr
    check_number("lr", lr, 0, strictly=True)
    data, net = data_for(model, train), _net(model, train, start, replacement)
    limits, counts = limits_of(budget, net, max_sites), counts_of(masks(net))
    if not isinstance(budget, Budget) and budget > (count := int(counts.sum())):
        raise ValueError(f"budget={budget:,}; the net keeps {count:,} ReLUs: at most that many")
    check_whole("batch_size", batch_size, 1, optional=True)
    if batch_size is None:
        batch_size = min(LARGEST, max(SMALLEST, len(data) // BATCHES))
    # Every step leaves the same share of what is above the least that a net can cost.
    least, value, most = limits.least(), limits.value(counts), limits.bounds[0].most
    ratio = min(1.0, max((most - least) / max(value - least, 1e-9), LAST))
    parts = max(1, min(PARTS, len(data) // batch_size))
    steps = max(1, round(DOWN * epochs * parts))
    clip = CLIP[replacement] if clip is None else clip
    settings = Finetune(epochs=1 / parts, lr=lr, clip=clip, batch_size=batch_size, **finetune)
    proposal = Blocks if max_sites is not None or isinstance(budget, Budget) else Saliency
    descent = Descent(
        net=net, data=data, budget=budget, max_sites=max_sites,
        drc=Shares(1 - ratio ** (1 / steps), steps), rt=rt, adt=adt, finetune=settings,
        proposal=proposal(distilled=settings.distill > 0),
        test=test, samples=min(SAMPLES, len(data)) if samples is None else samples,
        teacher=(model if teacher is None else teacher) if settings.distill else None, seed=seed,
        run_dir=run_dir, resume=resume, engine=engine, metric=metric, loss=loss,
        confidence=confidence, test_every=test_every, progress=progress, bar=False, epochs=epochs,
        recorded={"linearize": {"epochs": epochs}},
    )  # fmt: skip
    show = progress and ranks.rank() == 0
    if progress or dry_run:
        plan = descent.expected()  # on every rank
        if ranks.rank() == 0:
            to = budget if isinstance(budget, Budget) else f"{budget:,}"
            print(f"{counts.sum():,} ReLUs, budget {to}\n{plan}", flush=True)
    if dry_run:
        return Run(net, masks(net), [])
    batches = len(descent.tuner.sizes) if descent.tuner else 1
    bar = tqdm(total=epochs * batches, smoothing=0, disable=not show, bar_format=BAR)
    with bar, closing(descent.steps()) as steps_:
        for step in steps_:
            left = descent.left()
            if not bar.n:
                bar.initial = bar.n = round((epochs - left) * batches)
            spent = f"epoch {epochs - left:.3g} of {epochs}"
            bar.set_postfix_str(f"{spent}, {step.after:,} ReLUs")
            # At the budget the rest of an epoch first, then whole ones. Whole batches everywhere.
            place = round((epochs - left) * batches)
            end = place // batches * batches + batches
            if step.drc:
                end = math.ceil((place + 1) * parts / batches) * batches // parts
            part = min(left, (end - place) / batches)
            if part:
                down = sum(taken.epochs or 0.0 for taken in descent.history if taken.drc)
                rate = lr if step.drc else cosine(lr, epochs - left - down, epochs - down)
                found = descent.train(step, epochs=part, rates=[rate], bar=bar)
                step.train_loss = found["loss"]
    return Run(net, masks(net), descent.history)


def _net(model: nn.Module, data: Any, start: Any, replacement: str) -> nn.Module:
    """A copy of the model, or of the start's, with masks and the replacement."""
    given = model if start is None or isinstance(start, MaskSet) else getattr(start, "model", start)
    if not isinstance(given, nn.Module):
        raise TypeError(
            f"start is a {type(start).__name__}; give a MaskSet, a net with masks, or the result "
            f"of a starting point such as snl, of bcd or of load_run"
        )
    try:
        sites = mask_modules(given)
    except ValueError:
        example = next(data_for(given, data).batches(2, dtype=dtype_of(given)))[0]
        net: nn.Module = convert(given, example)
    else:
        order = list(REPLACEMENTS)  # each can become a later one
        found = {name for name, kind in REPLACEMENTS.items()
                 if any(isinstance(act, kind) for act in sites.values())}  # fmt: skip
        if least := [name for name in found if order.index(name) > order.index(replacement)]:
            what = "quadratics" if "poly" in least else "lines"
            raise ValueError(f"the net's removed ReLUs are {what}; pass replacement={max(least)!r}")
        net = copy.deepcopy(given)
    if replacement == "line":
        net = to_line(net, data)
    if replacement == "poly":
        net = to_poly(net, data)
    if isinstance(start, MaskSet):
        set_masks(net, start)
    return net
