"""snl: Selective Network Linearization (ICML 2022), the paper's starting point.

    start = fastbcd.snl(net, data, budget=30_000, test=test, run_dir="runs/snl-30k")
    fastbcd.bcd(start.model, data, budget=15_000, teacher=dense)

Each unit has a number a in place of its bit, y = a·relu(x) + (1-a)·x, trained with all weights by
Adam on CE + KD + λ·Σ|a|. A unit counts while a > threshold. After an epoch (the sixth or later)
without a new minimum of the count, λ is multiplied by κ. After the first epoch whose count is at
or below the budget the numbers are cut to bits, and the net is fine-tuned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd import ops
from fastbcd.descent.budget import Budget
from fastbcd.masking.masks import MaskSet
from fastbcd.masking.twin import twin
from fastbcd.runs.step import Epoch
from fastbcd.runtime.settings import setting, with_settings
from fastbcd.starts.mask_training import StartingPoint, train_masks
from fastbcd.starts.method import (
    ADAM,
    TUNED,
    MaskEpoch,
    MaskTraining,
    Method,
    TrainedMask,
)
from fastbcd.training.precision import training_dtype
from fastbcd.training.settings import Finetune

PATIENCE = 5  # epochs at the start in which λ never grows


@dataclass(frozen=True, kw_only=True)
class SnlSettings(MaskTraining):
    """The settings of `snl`; the defaults are the published values."""

    lr: float = setting(1e-3, "learning rate of the mask training", above=0)
    lambda0: float = setting(1e-5, "λ at the start", least=0)
    kappa: float = setting(1.1, "factor by which λ grows", least=1)
    threshold: float = setting(1e-2, "a unit counts while its a is above it", least=0)
    max_epochs: int = setting(2000, "epochs of the mask training at most", least=0)
    exact: bool = setting(
        True,
        "keep the `budget` units with the largest a, whether the training stopped below the budget "
        "(then some under the threshold are kept) or, at max_epochs, above it. False: keep those "
        "above the threshold, as published",
    )
    finetune: Finetune | None = setting(Finetune(epochs=100, lr=1e-3), TUNED)


@with_settings(SnlSettings)
def snl(
    net: nn.Module, data: Any, budget: int | Budget, **settings: Any
) -> StartingPoint:
    """Linearise the net in place, down to `budget` ReLUs.

    Args:
        net: with `MaskedReLU` sites. Removed ReLUs stay removed; frozen modules stay frozen, see
            `Finetuner`.
        data: the train set, as in `bcd`.
        budget: ReLUs to keep, or a `private.Target`. The training then ends at the number of ReLUs
            that it has room for, and those with the largest a that meet it are kept.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> start = snl(net, data, 2, lr=0.05, lambda0=0.1, finetune=Finetune(epochs=1))
    >>> start.masks.count(), sorted(start.accuracy)
    (2, ['final', 'thresholded', 'trained'])
    """
    return train_masks(Selective, net, data, budget, SnlSettings(**settings))


class SoftReLU(TrainedMask):
    """a*relu(x) + (1 - a)*x with `alpha` [*shape] learned: 1 at the start, 0 for removed ReLUs.

    `mask` is True for the units that take part; removed ReLUs stay removed.

    >>> act = SoftReLU(torch.tensor([True, False]))
    >>> act(torch.tensor([[-1.0, -1.0]])).tolist()
    [[-0.0, -1.0]]
    """

    def __init__(self, mask: Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(mask)
        self.alpha = nn.Parameter(self.mask.to(dtype))

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual, [B, *shape]."""
        return ops.soft_relu(x, self.alpha * self.mask, residual=residual)


def growth(counts: Sequence[int], lowest: int) -> list[bool]:
    """Whether λ grows after each epoch; lowest: the count before the first.

    >>> growth([10, 10, 9, 9, 9, 9, 8, 8], lowest=10)
    [False, False, False, False, False, True, False, True]
    """
    return [
        epoch >= PATIENCE and count >= min([lowest, *counts[:epoch]])
        for epoch, count in enumerate(counts)
    ]


class Selective(Method):
    """SNL's mask training."""

    name = "snl"
    optimizer = ADAM
    advice = "increase max_epochs, lambda0 or kappa"
    settings: SnlSettings

    def trained_net(self) -> nn.Module:
        dtype = training_dtype(self.net)
        return twin(self.net, lambda act: SoftReLU(act.mask, dtype))

    def train(self, epoch: MaskEpoch) -> None:
        counts = [earlier.count or 0 for earlier in epoch.history]
        updates = sum(growth(counts, self.start.count()))
        weight = math.prod([self.settings.kappa] * updates, start=self.settings.lambda0)

        def penalty() -> Tensor:  # λ·Σ|a| over all units
            sums = [act.alpha.abs().sum() for act in self.acts]
            return weight * torch.stack(sums).sum()

        epoch.train(self.settings.lr, penalty=penalty)
        grew = growth([*counts, self.masks().count()], self.start.count())
        epoch.record.notes |= {
            "lambda": weight,
            "lambda_grew": grew[-1],
            "lambda_updates": sum(grew),
        }

    def done(self, history: Sequence[Epoch]) -> bool:
        met = self.masks().count() <= self.budget
        return met or len(history) >= self.settings.max_epochs

    def bits(self) -> Tensor:
        return (self.values() > self.settings.threshold) & self.start.bits

    def values(self) -> Tensor:
        return self.gather("alpha")

    def decide(self) -> MaskSet:
        if self.settings.exact or self.goal.limits.bounds[0].name != "relus":
            return super().decide()
        return self.masks()
