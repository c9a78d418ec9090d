"""snl: Selective Network Linearization (ICML 2022), the start that the paper descends from.

    start = fastbcd.snl(net, data, budget=30_000, test=test, run_dir="runs/snl-30k")
    fastbcd.bcd(start.model, data, budget=15_000, teacher=dense)

Each unit has a number a instead of a bit, y = a·relu(x) + (1-a)·x, trained with all weights by
Adam on CE + KD + λ·Σ|a|. A unit counts while a > threshold. After an epoch (the sixth or later)
without a new minimum of the count λ grows by the factor κ. At the first epoch whose count is at
or below the budget the numbers are cut to bits, and the net is fine-tuned.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.masking.activations import MaskedReLU
from fastbcd.masking.masks import MaskSet, mask_modules, masks
from fastbcd.runtime.validate import check_number, check_whole
from fastbcd.starts.gated import (
    SoftReLU,
    check_budget,
    check_kind,
    gather,
    largest,
    twin,
)
from fastbcd.starts.mask_training import (
    Job,
    StartingPoint,
    carry_out,
    check_module,
)
from fastbcd.training.finetune import Finetune
from fastbcd.training.trainer import Training

PUBLISHED = Finetune(epochs=100, lr=1e-3)
PATIENCE = 5  # epochs at the start in which λ never grows
WATCHED = 16  # units whose a is recorded, if none are named


def snl(
    net: nn.Module,
    data: Any,
    budget: int,
    *,
    teacher: nn.Module | None = None,
    test: Any = None,
    lr: float = 1e-3,
    lambda0: float = 1e-5,
    kappa: float = 1.1,
    threshold: float = 1e-2,
    max_epochs: int = 2000,
    batch_size: int = 128,
    finetune: Finetune | None = PUBLISHED,
    exact: bool = True,
    watch: Sequence[int] | Tensor | None = None,
    seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    progress: bool = False,
) -> StartingPoint:
    """Linearise the net, in place, down to `budget` ReLUs.

    Args:
        net: with `MaskedReLU` sites. ReLUs that were removed before stay removed.
        teacher: for the distillation; None: the net as it is given.
        lr, lambda0, kappa, threshold, max_epochs, batch_size: of the mask training, as published.
        finetune: afterwards; None: no fine-tune. Its crops, flips, temperature, weight of the
            distillation and mixed precision are those of the mask training too.
        exact: keep the `budget` units with the largest a, whether the training stopped below the
            budget (then some under the threshold come back) or, at max_epochs, above it. False:
            keep those above the threshold, as published.
        watch: flat ids of units whose a is recorded every epoch; None: 16 at random.
        run_dir, resume: every epoch is saved there; the same call goes on from it.
        progress: bars, and a line an epoch.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> start = snl(net, data, 2, lr=0.05, lambda0=0.1, finetune=Finetune(epochs=1))
    >>> start.masks.count(), sorted(start.accuracy)
    (2, ['final', 'thresholded', 'trained'])
    """
    check_module(net)
    check_kind(net, MaskedReLU, "SNL makes units linear; for polynomial sites use fastbcd.autorep")
    check_budget(net, budget)
    check_whole("batch_size", batch_size, 1)
    check_whole("seed", seed, 0)
    settings: dict[str, Any] = {
        "budget": budget, "lr": lr, "lambda0": lambda0, "kappa": kappa, "threshold": threshold,
        "max_epochs": max_epochs, "exact": exact,
    }  # fmt: skip
    named = watch if watch is None else torch.as_tensor(watch).tolist()
    job = Job(
        "snl", {**settings, "watch": named}, net, data, test, teacher, finetune, batch_size, seed,
        run_dir, resume, progress,
    )  # fmt: skip
    return carry_out(job, lambda net: Selective(net, **settings, watch=watch, seed=seed))


class Penalty:
    """λ, and when it grows.

    >>> penalty = Penalty(1.0, kappa=2.0, lowest=10)
    >>> [penalty.after(e, n) for e, n in enumerate([10, 10, 9, 9, 9, 9, 8, 8])]
    [False, False, False, False, False, True, False, True]
    >>> penalty.weight, penalty.updates
    (4.0, 2)
    """

    def __init__(self, weight: float, kappa: float, lowest: int) -> None:
        self.weight, self.kappa, self.lowest, self.updates = weight, kappa, lowest, 0

    def after(self, epoch: int, count: int) -> bool:
        """At the end of an epoch, counted from 0: did λ grow?"""
        if count < self.lowest:
            self.lowest = count
            return False
        if epoch < PATIENCE:
            return False
        # λ ← κ·λ
        self.weight *= self.kappa
        self.updates += 1
        return True


class Selective:
    """SNL's way to train masks (a `Method`)."""

    def __init__(
        self,
        net: nn.Module,
        budget: int,
        lr: float,
        lambda0: float,
        kappa: float,
        threshold: float,
        max_epochs: int,
        exact: bool,
        watch: Sequence[int] | Tensor | None,
        seed: int,
    ) -> None:
        check_number("lr", lr, 0, strictly=True)
        check_number("lambda0", lambda0, 0)
        check_number("kappa", kappa, 1)
        check_number("threshold", threshold, 0)
        check_whole("max_epochs", max_epochs, 0)
        self.budget, self.lr, self.lambda0, self.kappa = budget, lr, lambda0, kappa
        self.threshold, self.max_epochs, self.exact = threshold, max_epochs, exact
        self.start = masks(net).copy()
        self.watched = _watched(self.start, watch, seed)
        self.model = twin(net, lambda act: SoftReLU(act.mask))
        self.alphas = [act.alpha for act in _soft(self.model)]
        self.penalty = Penalty(lambda0, kappa, self.start.count())

    def begin(self, history: list[dict[str, Any]]) -> None:
        self.penalty = Penalty(self.lambda0, self.kappa, self.start.count())
        for record in history:
            self.penalty.after(record["epoch"], record["count"])

    def done(self, history: list[dict[str, Any]]) -> bool:
        count = history[-1]["count"] if history else self.start.count()
        return count <= self.budget or len(history) >= self.max_epochs

    def epoch(self, training: Training, epoch: int, bar: Any) -> dict[str, Any]:
        weight = self.penalty.weight
        loss = training.epoch(epoch, self.lr, lambda: weight * self.absolute_sum(), bar=bar)
        count = int(self.bits().sum())
        grew = self.penalty.after(epoch, count)
        values = gather(self.alphas)[self.watched].tolist()
        return {
            "count": count, "lambda": weight, "lambda_grew": grew,
            "lambda_updates": self.penalty.updates, "loss": loss, "alphas": values,
        }  # fmt: skip

    def absolute_sum(self) -> Tensor:
        """Σ|a| over all units."""
        return torch.stack([alpha.abs().sum() for alpha in self.alphas]).sum()

    def bits(self) -> Tensor:
        return (gather(self.alphas) > self.threshold) & self.start.bits

    def decide(self, history: list[dict[str, Any]]) -> MaskSet:
        above = MaskSet(self.start.sites, self.bits())
        if above.count() > self.budget:
            then = "only the largest are kept" if self.exact else "all of them are kept"
            warnings.warn(
                f"after {len(history)} epochs {above.count():,} units are above the threshold, "
                f"more than the budget of {self.budget:,}; {then}. Give it more max_epochs, or a "
                f"larger lambda0 or kappa",
                RuntimeWarning,
                stacklevel=5,
            )
        return largest(self.start, gather(self.alphas), self.budget) if self.exact else above


def _soft(model: nn.Module) -> list[SoftReLU]:
    return [act for act in mask_modules(model).values() if isinstance(act, SoftReLU)]


def _watched(start: MaskSet, watch: Sequence[int] | Tensor | None, seed: int) -> Tensor:
    if watch is None:
        return start.sample(min(WATCHED, start.count()), seed=seed, step=0, trial=0)
    try:
        return start.check_kept(torch.as_tensor(watch))
    except (IndexError, TypeError, ValueError) as error:
        raise type(error)(f"watch: {error}") from None
