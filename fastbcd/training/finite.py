"""Whether the losses and weights of a training are finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastbcd.runtime import ranks
from fastbcd.training.optimizers import Parameters

CHECK_EVERY = 32  # batches: a check waits for the GPU


class Losses:
    """The losses of an epoch; refuses one that is not finite, and weights that are not."""

    def __init__(
        self, trained: Parameters, scaler: torch.amp.GradScaler, where: str
    ) -> None:
        self.trained = trained
        self.scaler = scaler
        self.where = where  # for errors
        self.losses: list[float] = []
        self.sizes: list[int] = []
        self.pending: list[Tensor] = []  # losses of this rank that are not read yet

    def add(self, loss: Tensor, size: int) -> None:
        """Note the loss of a batch of this size."""
        self.pending.append(loss.detach().double())
        self.sizes.append(size)
        if len(self.pending) == CHECK_EVERY:
            self._read()

    def mean(self) -> float:
        """The mean over images, after the last batch."""
        if self.pending:
            self._read()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            raise FloatingPointError(
                f"float16 gradients overflow at any scale in {self.where}; use amp=True "
                f"(bfloat16), or look at the range of the activations"
            )
        weights = [parameter.detach() for parameter in self.trained.values()]
        largest = torch.stack(torch._foreach_norm(weights, math.inf)).tolist()
        for name, value in zip(self.trained, largest, strict=True):
            self._check(value, f"weight {name}")
        weighted = [
            loss * size for loss, size in zip(self.losses, self.sizes, strict=True)
        ]
        return sum(weighted) / sum(self.sizes)

    def _read(self) -> None:
        losses = ranks.all_sum(torch.stack(self.pending) / ranks.world())
        self.pending = []
        for loss in losses.tolist():
            self._check(loss, f"loss ({loss}) of batch {len(self.losses)}")
            self.losses.append(loss)

    def _check(self, value: float, name: str) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name} is not finite in {self.where}; try a smaller lr, or look at the range "
                f"of the activations"
            )
