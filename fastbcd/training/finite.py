"""Whether the losses, gradients and weights of a training are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fastbcd.runtime import ranks
from fastbcd.training.optimizers import Parameters

CHECK_EVERY = 32  # batches: a check waits for the GPU


class FiniteCheck:
    """The losses of an epoch; refuses one, a gradient or a weight that is not finite.

    overflow: infinite gradients are allowed, as the step is then left out.
    """

    def __init__(self, trained: Parameters, *, epoch: int, step: int, overflow: bool) -> None:
        self.trained = trained
        self.epoch = epoch
        self.step = step
        self.overflow = overflow
        self.losses: list[float] = []
        self.pending: list[
            Tensor
        ] = []  # of each batch: the loss, each parameter's largest gradient

    def add(self, loss: Tensor) -> None:
        """Note a batch, after its backward pass."""
        parameters = self.trained.values()
        gradients = _largest(p.new_zeros(()) if p.grad is None else p.grad for p in parameters)
        if self.overflow:
            gradients = gradients.nan_to_num(posinf=0.0)
        mine = loss.detach().double()[None] / ranks.world()
        self.pending.append(torch.cat([mine, gradients]))
        if len(self.pending) == CHECK_EVERY:
            self.check_batches()

    def check_batches(self) -> None:
        """Check the batches since the last check."""
        if not self.pending:
            return
        table = torch.stack(self.pending)
        self.pending = []
        losses = ranks.all_sum(table[:, 0]).tolist()
        for loss, gradients in zip(losses, table[:, 1:].tolist(), strict=True):
            where = f"batch {len(self.losses)}"
            self._check(loss, f"loss ({loss})", where)
            for name, gradient in zip(self.trained, gradients, strict=True):
                self._check(gradient, f"gradient of {name}", where)
            self.losses.append(loss)

    def check_weights(self) -> None:
        """Check the weights after the last batch."""
        values = _largest(p.detach() for p in self.trained.values()).tolist()
        for name, value in zip(self.trained, values, strict=True):
            self._check(value, f"weight {name}", "after the last batch")

    def _check(self, value: float, name: str, where: str) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name} is not finite in epoch {self.epoch}, {where}, step {self.step}; try a "
                f"smaller lr, or look at the range of the activations"
            )


def check_scale(scaler: torch.amp.GradScaler, *, epoch: int, step: int) -> None:
    """Refuse a training in float16 whose gradients overflow whatever the loss is scaled by."""
    if scaler.is_enabled() and scaler.get_scale() < 1:
        raise FloatingPointError(
            f"float16 gradients overflow at any scale in epoch {epoch}, step {step}; use amp=True "
            f"(bfloat16), or look at the range of the activations"
        )


def _largest(tensors: Iterable[Tensor]) -> Tensor:
    """The largest magnitude in each tensor, [n]; not finite if a value is not."""
    return torch.stack(torch._foreach_norm(list(tensors), math.inf)).double()
