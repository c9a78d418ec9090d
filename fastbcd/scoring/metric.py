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
                raise TypeError(
                    f"{name}={value!r}; it must be a callable (outputs, targets)"
                )
        assert self.points  # which checks the bounds

    @cached_property
    def bounds(self) -> tuple[float, float] | None:
        """The least and the largest value of the metric, if it declares them."""
        if self.metric is None:
            return 0.0, 1.0
        bounds = getattr(self.metric, "bounds", None)
        if bounds is None:
            return None
        with suppress(TypeError, ValueError):
            low, high = map(float, bounds)
            if math.isfinite(high - low) and low < high:
                return low, high
        raise ValueError(
            f"metric.bounds={bounds!r}; it must be two numbers (low, high)"
        )

    @property
    def points(self) -> float:
        """What a drop of the metric by 1 is in percentage points, or 1 without bounds."""
        low, high = self.bounds or (0.0, 100.0)
        return 100.0 / (high - low)

    def percent(self, total: float, samples: int = 1) -> float:
        """The mean of the metric in percent of its range, or as it is without bounds."""
        low, _ = self.bounds or (0.0, 100.0)
        return self.points * (total - low * samples) / samples

    def each(self, outputs: Any, targets: Tensor) -> Tensor:
        """Outputs of n hypotheses, tensors [n, B, ...] -> DoubleTensor[n, 2, B]: metric and loss.

        Without a metric it is the margin, which is positive where the answer is right.
        """
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        count = 1
        if tensors:
            count = len(tensors[0])

        def one_by_one(judge: Loss) -> Tensor:
            return torch.stack(
                [judge(_copy_of(outputs, i), targets) for i in range(count)]
            )

        if self.metric is None or self.loss is None:
            logits = outputs.double()
        values = (
            margins(logits, targets)
            if self.metric is None
            else one_by_one(self._values)
        )
        if self.loss is None:
            repeated = torch.cat([targets] * count)
            losses = _cross_entropy(logits.flatten(0, 1), repeated).view(count, -1)
        else:
            losses = one_by_one(self.losses)
        return torch.stack([values, losses], 1)

    def _values(self, outputs: Any, targets: Tensor) -> Tensor:
        """The user's metric of each sample, DoubleTensor[B]; beyond its bounds only if invalid."""
        assert self.metric is not None
        values = self.metric(outputs, targets)
        if not isinstance(values, Tensor) or values.shape != targets.shape[:1]:
            raise ValueError(
                f"the metric returns {describe(values)} for a batch of {len(targets)}; it must "
                f"return one value per sample, a tensor [{len(targets)}]"
            )
        values = values.double()
        if self.bounds is None:
            return values
        inside = values.clamp(*self.bounds)
        rounded = (values - inside).abs() * self.points <= 1e-4
        return inside.where(rounded, values)

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss of each sample, a DoubleTensor[B] that can be differentiated.

        A loss that is one number for a batch is that of each of its samples.
        """
        if self.loss is None:
            return _cross_entropy(outputs, targets)
        losses = self.loss(outputs, targets)
        if not isinstance(losses, Tensor) or losses.shape not in (
            (),
            targets.shape[:1],
        ):
            raise ValueError(
                f"the loss returns {describe(losses)} for a batch of {len(targets)}; it must "
                f"return one value per sample, a tensor [{len(targets)}], or their mean, []"
            )
        return losses.double().expand(len(targets))

    def sums(self, answers: Tensor) -> tuple[float, float]:
        """The metric and the loss, summed over answers [2, n]; without a metric, right answers."""
        values, losses = answers
        if self.metric is None:
            values = values > 0
        return float(values.sum()), float(losses.sum())

    def check(self, answers: Tensor, who: str, images: Tensor) -> None:
        """An error that names the first image whose metric or loss is invalid; answers [2, n]."""
        values, losses = answers
        if self.metric is not None:
            low, high = self.bounds or (-math.inf, math.inf)
            invalid = ~values.isfinite() | (values < low) | (values > high)
            for place in invalid.nonzero():
                bounds = f" and lie in its bounds {self.bounds}" if self.bounds else ""
                raise ValueError(
                    f"the metric returns {float(values[place]):g} for image {int(images[place])} "
                    f"and {who}; its values must be finite{bounds}"
                )
        for place in losses.isnan().nonzero():
            problem = "gives NaN logits" if self.loss is None else "has a loss of NaN"
            raise FloatingPointError(
                f"{who} {problem} for image {int(images[place])}; look at the weights and at the "
                f"range of the activations"
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
        for wrong in targets[
            ((targets < 0) & (targets != -100)) | (targets >= classes)
        ][:1]:
            raise ValueError(
                f"target {int(wrong)} is out of range: {who} has {classes} classes"
            )


DEFAULT = Criterion()


def margins(outputs: Tensor, targets: Tensor) -> Tensor:
    """Logits [n, B, classes] -> DoubleTensor[n, B]: that of the label minus the largest other one.

    Its sign is that of the answer, also if logits are equal.

    >>> margins(torch.tensor([[[1.0, 3.0], [2.0, 2.0]]]), torch.tensor([1, 1]))
    tensor([[2., 0.]], dtype=torch.float64)
    """
    logits = outputs.double()
    labels = targets.expand(len(outputs), -1).unsqueeze(-1)
    others = logits.scatter(-1, labels, -torch.inf).amax(-1)
    margin = logits.gather(-1, labels).squeeze(-1) - others
    correct = logits.argmax(-1) == targets
    return margin.add(correct, alpha=1e-300)  # which changes no margin but 0


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each sample, DoubleTensor[B]: the mean over its pixels."""
    losses = F.cross_entropy(outputs.double(), targets, reduction="none")
    if losses.ndim == 1:
        return losses
    return losses.flatten(1).mean(1)


def are_logits(outputs: Any, targets: Tensor) -> bool:
    """Whether they are logits [B, classes, ...] and class indices [B, ...].

    >>> are_logits(torch.zeros(2, 5), torch.tensor([0, 4]))
    True
    """
    fits = (
        isinstance(outputs, Tensor)
        and outputs.ndim > 1
        and targets.dtype == torch.int64
    )
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
    return str(
        tree_map_only(Tensor, lambda t: f"{str(t.dtype)[6:]} {list(t.shape)}", value)
    )
