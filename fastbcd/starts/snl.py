"""snl: Selective Network Linearization (ICML 2022), the paper's starting point.

    start = fastbcd.snl(net, data, budget=30_000, test=test, run_dir="runs/snl-30k")
    fastbcd.bcd(start.model, data, budget=15_000, teacher=dense)

Each unit has a number a in place of its bit, y = a·relu(x) + (1-a)·x, trained with all weights by
Adam on CE + KD + λ·Σ|a|. A unit counts while a > threshold. After an epoch (the sixth or later)
without a new minimum of the count, λ is multiplied by κ. After the first epoch whose count is at
or below the budget the numbers are cut to bits, and the net is fine-tuned.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd import ops
from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.masks import MaskSet
from fastbcd.private.target import Target
from fastbcd.runtime.validate import check_number, check_whole
from fastbcd.starts.mask_training import (
    Method,
    StartingPoint,
    channels_last,
    only_identity,
    train_masks,
)
from fastbcd.training.loop import Session
from fastbcd.training.precision import training_dtype
from fastbcd.training.settings import Finetune

PUBLISHED = Finetune(epochs=100, lr=1e-3)
PATIENCE = 5  # epochs at the start in which λ never grows


def snl(
    net: nn.Module, data: Any, budget: int | Target, *, teacher: nn.Module | None = None,
    test: Any = None, lr: float = 1e-3, lambda0: float = 1e-5, kappa: float = 1.1,
    threshold: float = 1e-2, max_epochs: int = 2000, batch_size: int = 128,
    finetune: Finetune | None = PUBLISHED, exact: bool = True, seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None, resume: str | bool = "auto",
    progress: bool = False,
) -> StartingPoint:  # fmt: skip
    """Linearise the net in place, down to `budget` ReLUs.

    Args:
        net: with `MaskedReLU` sites. Removed ReLUs stay removed; frozen modules stay frozen, see
            `Finetuner`.
        budget: ReLUs to keep, or a `private.Target`. The training then ends at the number of ReLUs
            that it has room for, and those with the largest a that meet it are kept.
        teacher: for the distillation; None: the net as it is given.
        lr, lambda0, kappa, threshold, max_epochs, batch_size: of the mask training; the defaults
            are the published values.
        finetune: after the masks are fixed; None: no fine-tune. Its crops, flips, temperature,
            distillation weight and mixed precision are also those of the mask training.
        exact: keep the `budget` units with the largest a, whether the training stopped below the
            budget (then some under the threshold are kept) or, at max_epochs, above it. False:
            keep those above the threshold, as published.
        run_dir, resume: every epoch is saved there; the same call resumes from it.
        progress: show progress bars and one line per epoch.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 4, 4), torch.arange(50) % 3
    >>> start = snl(net, data, 2, lr=0.05, lambda0=0.1, finetune=Finetune(epochs=1))
    >>> start.masks.count(), sorted(start.accuracy)
    (2, ['final', 'thresholded', 'trained'])
    """
    given = dict(locals())
    check_number("lr", lr, 0, strictly=True)
    check_number("lambda0", lambda0, 0)
    check_number("kappa", kappa, 1)
    check_number("threshold", threshold, 0)
    check_whole("max_epochs", max_epochs, 0)
    return train_masks(Selective, given)


class SoftReLU(MaskedActivation):
    """a*relu(x) + (1 - a)*x with `alpha` [*shape] learned: 1 at the start, 0 for removed ReLUs.

    `mask` is True for the units that take part; removed ReLUs stay removed.

    >>> act = SoftReLU(torch.tensor([True, False]))
    >>> act(torch.tensor([[-1.0, -1.0]])).tolist()
    [[-0.0, -1.0]]
    """

    def __init__(self, mask: Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(tuple(mask.shape), device=mask.device)
        self.mask = channels_last(mask.bool())
        self.alpha = nn.Parameter(self.mask.to(dtype))

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual, [B, *shape]."""
        return ops.soft_relu(x, self.alpha * self.mask, residual=residual)


def growth(counts: Sequence[int], lowest: int) -> list[bool]:
    """Whether λ grows after each epoch; lowest: the count before the first.

    >>> growth([10, 10, 9, 9, 9, 9, 8, 8], lowest=10)
    [False, False, False, False, False, True, False, True]
    """
    return [e >= PATIENCE and n >= min((lowest, *counts[:e])) for e, n in enumerate(counts)]


class Selective(Method):
    """SNL's mask training."""

    name = "snl"

    @staticmethod
    def prepare(net: nn.Module) -> nn.Module:
        return only_identity(net)

    def __init__(self, net: nn.Module, s: SimpleNamespace) -> None:
        super().__init__(net, s, lambda act: SoftReLU(act.mask, training_dtype(net)))
        self.counts: list[int] = []

    def begin(self, history: list[dict[str, Any]]) -> None:
        self.counts = [record["count"] for record in history]

    def done(self, history: list[dict[str, Any]]) -> bool:
        count = history[-1]["count"] if history else self.start.count()
        return count <= self.s.budget or len(history) >= self.s.max_epochs

    def epoch(self, session: Session, epoch: int, bar: Any) -> dict[str, Any]:
        weight = self.s.lambda0
        for grew in growth(self.counts, self.start.count()):
            weight *= self.s.kappa if grew else 1

        def penalty() -> Tensor:  # λ·Σ|a| over all units
            return weight * torch.stack([act.alpha.abs().sum() for act in self.acts]).sum()

        loss = session.epoch(epoch, self.s.lr, penalty=penalty, bar=bar)
        self.counts.append(int(self.bits().sum()))
        grown = growth(self.counts, self.start.count())
        return {
            "count": self.counts[-1], "lambda": weight, "lambda_grew": grown[-1],
            "lambda_updates": sum(grown), "loss": loss,
        }  # fmt: skip

    def bits(self) -> Tensor:
        return (self.gather("alpha") > self.s.threshold) & self.start.bits

    def decide(self, history: list[dict[str, Any]]) -> MaskSet:
        above, exact = MaskSet(self.start.sites, self.bits()), self.s.exact
        if above.count() > self.s.budget:
            then = "only the largest are kept" if exact else "all of them are kept"
            found = f"{above.count():,} units are above the threshold"
            self.warn_above(history, found, f"{then}. Increase max_epochs, lambda0 or kappa")
        return self.largest(self.gather("alpha")) if exact else above
