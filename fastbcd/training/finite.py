"""Whether the losses, gradients and weights of a training are finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastbcd.runtime import ranks
from fastbcd.training.optimizers import Parameters

CHECK_EVERY = 32  # batches: a check waits for the GPU


class FiniteCheck:
    """The losses of an epoch; refuses one, a gradient or a weight that is not finite.

    With a scaler, gradients may overflow: it leaves out the step, and tries a smaller scale.
    """

    def __init__(
        self, trained: Parameters, scaler: torch.amp.GradScaler, *, epoch: int, step: int
    ) -> None:
        self.trained = trained
        self.scaler = scaler
        self.epoch = epoch
        self.step = step
        self.losses: list[float] = []
        self.pending: list[Tensor] = []  # of each batch: its loss, each parameter's gradient

    def add(self, loss: Tensor) -> None:
        """Note a batch, after its backward pass."""
        gradients = []
        for parameter in self.trained.values():
            gradient = parameter.grad
            if gradient is None:
                gradient = parameter.new_zeros(())
            gradients.append(gradient)
        largest = _largest(gradients)
        if self.scaler.is_enabled():
            largest = largest.nan_to_num(posinf=0.0)
        mine = loss.detach().double()[None] / ranks.world()
        self.pending.append(torch.cat([mine, largest]))
        if len(self.pending) == CHECK_EVERY:
            self._check_batches()

    def finish(self) -> list[float]:
        """The losses of all batches, after the last one."""
        if self.pending:
            self._check_batches()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            raise FloatingPointError(
                f"float16 gradients overflow at any scale in epoch {self.epoch}, step {self.step}; "
                f"use amp=True (bfloat16), or look at the range of the activations"
            )
        weights = _largest([p.detach() for p in self.trained.values()])
        for name, value in zip(self.trained, weights.tolist(), strict=True):
            self._check(value, f"weight {name}", "after the last batch")
        return self.losses

    def _check_batches(self) -> None:
        table = torch.stack(self.pending)
        self.pending = []
        losses = ranks.all_sum(table[:, 0]).tolist()
        for loss, gradients in zip(losses, table[:, 1:].tolist(), strict=True):
            where = f"batch {len(self.losses)}"
            self._check(loss, f"loss ({loss})", where)
            for name, gradient in zip(self.trained, gradients, strict=True):
                self._check(gradient, f"gradient of {name}", where)
            self.losses.append(loss)

    def _check(self, value: float, name: str, where: str) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name} is not finite in epoch {self.epoch}, {where}, step {self.step}; try a "
                f"smaller lr, or look at the range of the activations"
            )


def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest magnitude in each tensor, [n]; not finite if a value is not."""
    return torch.stack(torch._foreach_norm(tensors, math.inf)).double()
