"""Training by epochs that can be put down and taken up again: masks with weights, or weights.

    loss = CE + distill·T²·KL(teacher ‖ net) + penalty

Crops, flips, distillation and mixed precision are those of a `Finetune`, whose `Finetuner` also
lends the teacher's cached logits. Without a penalty the weights become what `Finetuner.run`
makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.graph.fuse import fused
from fastbcd.runtime import ranks
from fastbcd.runtime.malloc import kept_memory
from fastbcd.training.finetune import Finetune, loss_of, repeatable
from fastbcd.training.teacher import TeacherLogits

PREFIX = "optimizer."  # before the names of its tensors in a state


class Training:
    """One network, its optimizer, its data.

    Same state, seed, step and epoch: the same weights to the bit. `step` names the stream of
    crops and flips, as in `ImageData.train_batches`.
    """

    def __init__(
        self,
        model: nn.Module,
        data: ImageData,
        teacher: TeacherLogits | None,
        settings: Finetune,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        batch_size: int,
        seed: int,
        step: int,
    ) -> None:
        self.net, self.data, self.teacher, self.settings = model, data, teacher, settings
        self.batch_size, self.seed, self.step = batch_size, seed, step
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.model, self.memory_format = fused(model)
        self._turned = [p for p in self.trained.values() if p.ndim == 4 and p.is_contiguous()]
        for p in self._turned:
            p.data = p.data.contiguous(memory_format=self.memory_format)
        if settings.compile:
            self.model.compile()
        self.optimizer = optimizer(list(self.trained.values()))

    def close(self) -> None:
        """Give the shared weights back in the memory order they had, without gradients."""
        for p in self._turned:
            p.data = p.data.contiguous()
        self.optimizer.zero_grad(set_to_none=True)

    def epoch(
        self,
        epoch: int,
        lr: float,
        penalty: Callable[[], Tensor | float] = lambda: 0.0,
        before_batch: Callable[[int], None] = lambda iteration: None,
        bar: Any = None,
    ) -> float:
        """Train on every sample once; the mean loss, penalty included.

        before_batch gets the number of the batch, counted from the first epoch.
        """
        s, targets = self.settings, self._targets(epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        batches = self.data.train_batches(
            self.batch_size, seed=self.seed, step=self.step, epoch=epoch, padding=s.padding,
            flip=s.flip, rank=ranks.rank(), world=ranks.world(), memory_format=self.memory_format,
        )  # fmt: skip
        device = self.data.device
        amp = device.type == "cuda" if s.amp is None else s.amp
        losses: list[Tensor] = []
        weights: list[int] = []
        with kept_memory(), repeatable(device, self.seed, epoch):
            for number, (x, labels, indices, _) in enumerate(batches):
                before_batch(epoch * self.batches + number)
                with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                    logits = self.model(x)
                target = None if targets is None else targets[indices]
                loss = loss_of(logits.float(), labels, target, s.temperature, s.distill)
                # This rank's part of the mean over the whole batch; every rank has the penalty.
                whole = min(self.batch_size, len(self.data) - number * self.batch_size)
                loss = loss * (len(x) / whole) + penalty() / ranks.world()
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self._sum_gradients()
                self.optimizer.step()
                losses.append(loss.detach())
                weights.append(whole)
                if bar is not None:
                    bar.update()
        for buffer in self.net.buffers() if ranks.world() > 1 else ():
            buffer.copy_(ranks.from_first(buffer))
        return self._mean(epoch, losses, weights)

    @property
    def batches(self) -> int:
        """Batches an epoch."""
        return -(-len(self.data) // self.batch_size)

    def _targets(self, epoch: int) -> Tensor | None:
        """The teacher's log-probabilities at temperature T for this epoch's views, [N, classes]."""
        if self.teacher is None:
            return None
        s = self.settings
        views = self.data.view_ids(
            seed=self.seed, step=self.step, epoch=epoch, padding=s.padding, flip=s.flip
        )
        return F.log_softmax(self.teacher.epoch(views) / s.temperature, 1)

    def _sum_gradients(self) -> None:
        if ranks.world() > 1:
            for p in self.trained.values():
                if p.grad is not None:
                    p.grad.copy_(ranks.all_sum(p.grad))

    def _mean(self, epoch: int, losses: list[Tensor], weights: list[int]) -> float:
        """The epoch's mean loss, if everything in it was finite."""
        values = ranks.all_sum(torch.stack(losses)).double().cpu()
        bad = (~values.isfinite()).nonzero().flatten()
        broken = [n for n, p in self.trained.items() if not bool(p.detach().isfinite().all())]
        if len(bad) or broken:
            what = f"the loss of batch {int(bad[0])}" if len(bad) else f"the weight {broken[0]}"
            raise FloatingPointError(
                f"{what} is not finite in epoch {epoch} of the training; try a smaller lr, "
                f"or look at the range of the activations"
            )
        share = torch.tensor(weights, dtype=torch.float64)
        return float((values * share).sum() / share.sum())

    # ------------------------------------------------------------------ state as plain tensors

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers and the optimizer's moments, on the CPU."""
        tensors = {f"net.{n}": t for n, t in self._tensors().items()}
        for name, p in self.trained.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                if value is not None:
                    tensors[f"{PREFIX}{key}.{name}"] = value
        return {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take up what `state` put down."""
        with torch.no_grad():
            for name, t in self._tensors().items():
                t.copy_(tensors[f"net.{name}"])
            for key in (k for k in tensors if k.startswith(PREFIX)):
                what, name = key.removeprefix(PREFIX).split(".", 1)
                p, value = self.trained[name], tensors[key]
                # A moment lies in memory as its parameter does; the number of steps is one number.
                kept = value.clone() if what == "step" else torch.empty_like(p).copy_(value)
                self.optimizer.state[p][what] = kept

    def _tensors(self) -> dict[str, Tensor]:
        return dict((*self.net.named_parameters(), *self.net.named_buffers()))
