"""Metric and loss: what a hypothesis is judged by, and what decides ties.

A metric is a callable (outputs, targets) -> [B], one value per sample, larger is better. outputs is
what the net returns for a batch: a tensor of any shape, a tuple or a dict. With an attribute
`bounds = (low, high)`, drops and ADT are in percentage points of that range; without it they are in
the metric's own units. A loss is a callable (outputs, targets) that returns one value per sample,
[B], or their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Metric = Callable[[Any, Tensor], Tensor]
Loss = Callable[[Any, Tensor], Tensor]
WIDTH = 4  # of a row: the sums of metric and loss; how many values are invalid, and their sum


@dataclass(frozen=True)
class Criterion:
    """A metric and a loss; None: top-1 accuracy, and cross-entropy.

    >>> Criterion().points, Criterion(lambda outputs, targets: -(outputs - targets).abs()).points
    (100.0, 1.0)
    """

    metric: Metric | None = None
    loss: Loss | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not callable(value):
                raise TypeError(f"{name}={value!r}; it must be a callable (outputs, targets)")
        assert self.points  # which checks the bounds

    @cached_property
    def bounds(self) -> tuple[float, float] | None:
        """The least and the largest value of the metric, if it declares them."""
        given = (0.0, 1.0) if self.metric is None else getattr(self.metric, "bounds", None)
        if given is None:
            return None
        with suppress(TypeError, ValueError):
            low, high = map(float, given)
            if math.isfinite(high - low) and low < high:
                return low, high
        raise ValueError(f"metric.bounds={given!r}; it must be two numbers (low, high)")

    @property
    def points(self) -> float:
        """What a drop of the metric by 1 is in percentage points, or 1 without bounds."""
        return 1.0 if self.bounds is None else 100.0 / (self.bounds[1] - self.bounds[0])

    def percent(self, total: float, samples: int = 1) -> float:
        """The mean of the metric in percent of its range, or as it is without bounds."""
        low = 0.0 if self.bounds is None else self.bounds[0]
        return self.points * (total - low * samples) / samples

    def values(self, outputs: Any, targets: Tensor) -> Tensor:
        """The metric of each sample, DoubleTensor[B]."""
        if self.metric is None:
            return (outputs.argmax(1) == targets).double()
        found = self.metric(outputs, targets)
        if not isinstance(found, Tensor) or found.shape != targets.shape[:1]:
            raise ValueError(
                f"the metric returns {describe(found)} for a batch of {len(targets)}; it must "
                f"return one value per sample, a tensor [{len(targets)}]"
            )
        return found.double()

    def summed_loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss summed over the batch, a DoubleTensor []; it can be differentiated."""
        if self.loss is None:
            each = F.cross_entropy(outputs.double(), targets, reduction="none")
            return each.flatten(1).mean(1).sum() if each.ndim > 1 else each.sum()
        found = self.loss(outputs, targets)
        if not isinstance(found, Tensor) or found.shape not in ((), targets.shape[:1]):
            raise ValueError(
                f"the loss returns {describe(found)} for a batch of {len(targets)}; it must return "
                f"one value per sample, a tensor [{len(targets)}], or their mean, a tensor []"
            )
        return found.double().sum() * (1 if found.ndim else len(targets))

    def rows(self, outputs: Any, targets: Tensor) -> Tensor:
        """Outputs of n hypotheses, tensors [n, B, ...] -> DoubleTensor[n, WIDTH] of sums."""
        if self.metric is None and self.loss is None:
            hits = outputs.argmax(-1) == targets
            answers = outputs.double().flatten(0, 1), targets.repeat(len(outputs))
            losses = F.cross_entropy(*answers, reduction="none").view(hits.shape).sum(1)
            return torch.stack([hits.double().sum(1), losses, *losses.new_zeros(2, len(hits))], 1)
        found = []
        for i in range(next((len(t) for t in tree_leaves(outputs) if isinstance(t, Tensor)), 1)):
            values = self.values(_copy_of(outputs, i), targets)
            invalid = ~values.isfinite()
            if self.bounds is not None:
                inside = values.clamp(*self.bounds)
                invalid |= (values - inside).abs() * self.points > 1e-4  # beyond rounding
                values = values.where(invalid, inside)
            loss = self.summed_loss(_copy_of(outputs, i), targets)
            wrong = torch.where(invalid, values, 0.0).sum()
            found.append(torch.stack([values.sum(), loss, invalid.double().sum(), wrong]))
        return torch.stack(found)

    def margins_and_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Logits [n, B, classes] -> DoubleTensor[n, 2, B], for accuracy as the metric.

        The margin is the logit of the label minus the largest other one; its sign is that of the
        answer, also if logits are equal. A loss that is one number for a batch is its mean.
        """
        correct = outputs.argmax(-1) == targets
        top = outputs.double().topk(min(2, outputs.shape[-1])).values
        own = outputs.double().gather(-1, targets.expand(len(outputs), -1).unsqueeze(-1))[..., 0]
        above = (top[..., 0] - top[..., -1]).clamp(min=1e-300)
        margins = torch.where(correct, above, own - top[..., 0])
        if self.loss is None:
            answers = outputs.double().flatten(0, 1), targets.repeat(len(outputs))
            losses = F.cross_entropy(*answers, reduction="none").view(margins.shape)
        else:
            means = [self.summed_loss(_copy_of(outputs, i), targets) for i in range(len(outputs))]
            losses = torch.stack(means).unsqueeze(1).expand(margins.shape) / len(targets)
        return torch.stack([margins, losses], 1)

    def check_row(self, row: list[float], who: str, where: str) -> None:
        """An error if the metric or the loss of some samples is invalid."""
        _, loss, invalid, wrong = row
        if math.isnan(loss):
            what = "gives NaN logits" if self.loss is None else "has a loss of NaN"
            raise FloatingPointError(
                f"{who} {what} {where}; look at the weights and at the range of the activations"
            )
        if invalid:
            mean = f"{wrong / invalid:g} on average" if math.isfinite(wrong) else "not finite"
            bounds = "" if self.bounds is None else f" and lie in its bounds {self.bounds}"
            raise ValueError(
                f"the metric returns {invalid:.0f} invalid values ({mean}) for {who} {where}; they "
                f"must be finite{bounds}"
            )

    def check_targets(self, outputs: Any, targets: Tensor, who: str) -> None:
        """Refuse outputs and targets that cross-entropy does not fit, if that is the loss."""
        if self.loss is not None:
            return
        if not are_logits(outputs, targets):
            raise ValueError(
                f"{who} returns {describe(outputs)} beside targets {describe(targets)}: "
                f"cross-entropy needs logits [B, classes, ...] and int64 targets [B, ...]; pass "
                f"loss=, a callable (outputs, targets)"
            )
        classes = outputs.shape[1]
        for wrong in targets[((targets < 0) & (targets != -100)) | (targets >= classes)][:1]:
            raise ValueError(f"target {int(wrong)} is out of range: {who} has {classes} classes")


DEFAULT = Criterion()


def are_logits(outputs: Any, targets: Tensor) -> bool:
    """Whether they are logits [B, classes, ...] and class indices [B, ...].

    >>> are_logits(torch.zeros(2, 5), torch.tensor([0, 4]))
    True
    """
    fits = isinstance(outputs, Tensor) and outputs.ndim > 1 and targets.dtype == torch.int64
    return fits and targets.shape[1:] == outputs.shape[2:]


def _copy_of(outputs: Any, i: int) -> Any:
    """The outputs of hypothesis i, in memory that a metric or a loss may overwrite."""
    return tree_map_only(Tensor, lambda t: t[i].clone(), outputs)


def at_least_float32(t: Tensor) -> Tensor:
    """t in float32 if it has 16 bits."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def describe(value: Any) -> str:
    """Tensors as dtype and shape, anything else as it is.

    >>> describe({"a": torch.zeros(2, 3)})
    "{'a': 'float32 [2, 3]'}"
    """
    return str(tree_map_only(Tensor, lambda t: f"{str(t.dtype)[6:]} {list(t.shape)}", value))
