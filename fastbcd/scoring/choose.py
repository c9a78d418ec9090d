"""choose: the hypothesis that a step takes, scoring no more than the decision needs.

The rule (Algorithm 1): the lowest-numbered hypothesis whose accuracy drops by less than ADT
percentage points; if none does, the one that drops least, ties by smaller loss, then by number.
Losses count as equal within 1e-5, the rounding that engines and batch sizes may differ by.

What is certain is not computed (exact.py); with a confidence, what is certain enough is not
computed either (confident.py). One selection serves both (decision.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from torch import Tensor, nn

from fastbcd.data.for_net import data_for
from fastbcd.masking.convert import unwrap
from fastbcd.masking.masks import MaskSet, masks
from fastbcd.scoring.answers import Answers, checked_removal, prepared
from fastbcd.scoring.confident import Confident, check_confidence, visiting_order
from fastbcd.scoring.decision import Selection
from fastbcd.scoring.engine import Engine, as_engine
from fastbcd.scoring.exact import Exact
from fastbcd.scoring.metric import Criterion, Loss, Metric


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The hypothesis to take, and what the decision cost.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4), nn.Linear(4, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> choice = fastbcd.choose(net, [torch.tensor([2, 3])], data, adt=100.0)
    >>> choice.removal, choice.accepted, choice.tried
    (tensor([2, 3]), True, 1)
    """

    number: int
    removal: Tensor  # LongTensor[D]
    accepted: bool  # its drop is below ADT; otherwise the best of all
    tried: int  # hypotheses drawn from the source
    drops: dict[int, float]  # by number, of those that were scored on all images
    images: int  # hypothesis-images that were run, at most tried * samples
    loss: float
    base_loss: float
    samples: int
    engine: str
    value: float  # mean of the metric, of the chosen hypothesis
    base_value: float
    percent: (
        float  # the value in percent of the metric's range; as it is without bounds
    )
    base_percent: float
    # Of the answers, in mixed precision: the share that was scored again in float32.
    rescored: float | None = None
    # With a confidence the numbers above are estimates, unless all images were seen, and `drops`
    # holds all hypotheses.
    # Images that were needed, by number (-1: the base).
    seen: dict[int, int] | None = None
    # Holds the drop, with the stated probability.
    interval: tuple[float, float] | None = None
    margins: Tensor | None = field(default=None, repr=False)  # for the next step


def choose(
    net: nn.Module,
    hypotheses: Iterable[Tensor],
    data: Any,
    *,
    adt: float,
    engine: str | Engine = "auto",
    metric: Metric | None = None,
    loss: Loss | None = None,
    confidence: float | None = None,
    seed: int = 0,
    step: int = 0,
    margins: Tensor | None = None,
) -> Choice:
    """Take the first hypothesis with a drop below `adt` percentage points, else the best.

    With a metric that has no bounds, `adt` is in its units, and all images are always scored.

    Args:
        hypotheses: removals, LongTensor[D] each. They are drawn in waves of 1, 2, 4, ...
            `Engine.wave`, and none after one is accepted: if that is the first, it is the only
            one scored.
        engine, metric, loss: as in `score`. The engine never changes the choice.
        confidence: None is exact. With 0.999 the choice differs from the exact one with a
            probability of 0.1 % at most: images are visited in a random order, and a decision is
            made as soon as it is that certain (docs/confidence.md). For accuracy only.
        seed, step: determine the random order; each step needs one of its own.
        margins: `Choice.margins` of the step before, for the same data. Images that are likely to
            change their answer are visited sooner, so that fewer are needed.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> choose(net, [torch.tensor([0]), torch.tensor([1])], data, adt=100.0).number
    0
    """
    settings = as_engine(engine)
    criterion = Criterion(metric, loss)
    check_confidence(confidence, metric)
    net = unwrap(net)
    images = data_for(net, data)
    removals: dict[int, Tensor] = {}
    waves = _waves(masks(net).copy(), hypotheses, settings.wave, removals)
    first = next(waves, None)
    if first is None:
        raise ValueError("there is no hypothesis to choose from")
    decision: Exact | Confident = Exact(criterion, len(images), adt=adt)
    if confidence is not None:
        options: dict[str, float] = {"adt": adt, "confidence": confidence}
        visits = visiting_order(len(images), margins, seed=seed, step=step, **options)
        decision = Confident(visits, **options)
    with prepared(
        net, removals, images, settings, criterion, decision, expected=settings.wave
    ) as answers:
        # Or else the next step lacks margins.
        every_base = decision.to_the_end or margins is None
        spare = decision
        if answers.mixed is not None:
            spare = copy.deepcopy(decision)
        choice = _decided(answers, decision, chain([first], waves), every_base)
        mixed = answers.mixed
        if mixed is None or mixed.confirms(answers.score, choice.number):
            return choice
        mixed.bound = math.inf
        return _decided(answers, spare, chain([[*removals]], waves), every_base)


def _decided(
    answers: Answers,
    decision: Exact | Confident,
    waves: Iterable[list[int]],
    every_base: bool,
) -> Choice:
    """every_base: the base runs on all images first."""
    in_float32 = None
    if answers.mixed is not None:
        in_float32 = answers.in_float32
    selection = Selection(answers, decision, in_float32)
    if every_base:
        selection.complete(-1)
    return _choice(answers, decision, *selection.choose(waves))


def _waves(
    current: MaskSet,
    hypotheses: Iterable[Tensor],
    largest: int,
    removals: dict[int, Tensor],
) -> Iterator[list[int]]:
    """The numbers of 1, 2, 4, ... `largest` hypotheses, whose ids are put into `removals`."""
    source = enumerate(hypotheses)
    size = 1
    while wave := {
        k: checked_removal(current, ids, k) for k, ids in islice(source, size)
    }:
        removals |= wave
        yield [*wave]
        size = min(2 * size, largest)


def _choice(
    answers: Answers, decision: Exact | Confident, number: int, accepted: bool
) -> Choice:
    criterion = answers.criterion
    samples = decision.samples
    metric, loss = decision.totals(number)
    base, base_loss = decision.totals(-1)
    images = [decision.seen(k) for k in answers.removals]
    rescored = None
    if answers.mixed is not None:
        rescored = answers.mixed.share
    return Choice(
        number=number,
        removal=answers.removals[number],
        accepted=accepted,
        tried=len(images),
        images=sum(images),
        loss=loss / samples,
        base_loss=base_loss / samples,
        samples=samples,
        engine=answers.plan.engine.name,
        value=metric / samples,
        base_value=base / samples,
        percent=criterion.percent(metric, samples),
        base_percent=criterion.percent(base, samples),
        rescored=rescored,
        **decision.record(number),
    )
