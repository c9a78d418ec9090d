"""score: the accuracy and the loss of every hypothesis, a set of kept ReLUs to remove.

All engines give the same numbers: `sequential` is the paper's loop, `stacked` runs all hypotheses
in one pass per data batch, `collapsed` runs them on the net's collapsed form, which is cheap when
few ReLUs are left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.data.for_net import data_for
from fastbcd.masking.convert import unwrap
from fastbcd.masking.masks import masks
from fastbcd.scoring.answers import checked_removal, prepared
from fastbcd.scoring.decision import Selection
from fastbcd.scoring.engine import Engine, as_engine
from fastbcd.scoring.exact import Exact
from fastbcd.scoring.metric import Criterion, Loss, Metric

NONE = torch.empty(0, dtype=torch.float64)


@dataclass(frozen=True)
class Scores:
    """What `score` found: K hypotheses and the base, which is the net as it is.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(4), nn.Linear(4, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> fastbcd.score(net, [torch.tensor([2, 3]), torch.tensor([0])], data).drop.shape
    torch.Size([2])
    """

    correct: Tensor | None  # LongTensor[K]; None with a metric of your own
    loss: Tensor  # DoubleTensor[K], mean cross-entropy, or mean of your own loss
    base_correct: int | None
    base_loss: float
    samples: int
    engine: str
    sums: Tensor = NONE  # DoubleTensor[K], of the metric
    base_sum: float = 0.0
    points: float = 100.0  # percentage points per unit of the metric; 1 without bounds

    @property
    def value(self) -> Tensor:
        """The mean of the metric, DoubleTensor[K]."""
        return self.sums / self.samples

    @property
    def base_value(self) -> float:
        """The mean of the metric of the base."""
        return self.base_sum / self.samples

    @property
    def drop(self) -> Tensor:
        """How much less the metric is than the base's, DoubleTensor[K].

        In percentage points (of accuracy, or of the range of a metric with bounds), or in the
        units of a metric without bounds.
        """
        return self.points * (self.base_sum - self.sums) / self.samples


def score(
    net: nn.Module,
    removals: Tensor | Iterable[Tensor],
    data: Any,
    engine: str | Engine = "auto",
    *,
    metric: Metric | None = None,
    loss: Loss | None = None,
    explain: bool = False,
) -> Scores:
    """Score each removal on all of `data`, in eval mode and without augmentation.

    Args:
        net: with masked activations; its masks and its mode are as before afterwards.
        removals: LongTensor[K, D] of flat ids of kept ReLUs, or K tensors of any lengths.
        data: ImageData, a pair (images, labels), a Dataset or a DataLoader.
        engine: "auto", "sequential", "stacked", "collapsed", or `Engine(...)` with options. The
            numbers do not depend on it.
        metric: a callable (outputs, targets) -> [B], one value per sample, larger is better; None:
            1 where the largest logit is that of the label, else 0. If values have limits, state
            them as metric.bounds = (low, high).
        loss: a callable (outputs, targets) -> [B], or their mean; None: cross-entropy.
        explain: print the plan first.

    The net may return a tensor of any shape, a tuple or a dict; metric and loss see the outputs of
    one hypothesis for one batch at a time.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> images, labels = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> scores = score(net, torch.tensor([[0, 1], [4, 5]]), (images, labels))
    >>> scores.drop.shape, scores.samples
    (torch.Size([2]), 50)
    """
    criterion = Criterion(metric, loss)
    net = unwrap(net)
    images = data_for(net, data)
    if isinstance(removals, Tensor) and removals.ndim != 2:
        raise ValueError(
            f"removals have shape {tuple(removals.shape)}; expected [K, D]: K hypotheses of D ids"
        )
    removed = {k: checked_removal(masks(net), ids, k) for k, ids in enumerate(removals)}
    exact = Exact(criterion, len(images), adt=0.0)
    options = as_engine(engine), criterion, exact
    with prepared(net, removed, images, *options) as answers:
        plan = answers.plan
        if explain:
            print(f"data: {images}", plan, sep="\n")
        Selection(answers, exact).complete(-1, *removed)
    base, base_loss = exact.totals(-1)
    totals = [exact.totals(k) for k in removed]
    sums, losses = torch.tensor(totals, dtype=torch.float64).view(-1, 2).T
    correct = base_correct = None
    if metric is None:
        correct = sums.long()
        base_correct = int(base)
    return Scores(
        correct=correct,
        loss=losses / len(images),
        base_correct=base_correct,
        base_loss=base_loss / len(images),
        samples=len(images),
        engine=plan.engine.name,
        sums=sums,
        base_sum=base,
        points=criterion.points,
    )
