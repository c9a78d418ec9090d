"""The training loop of `Finetuner`, `train` and the starting points.

    trainer = Trainer(net, data, Finetune(batch_size=64), teacher)
    with trainer.session() as session:
        for epoch in range(3):
            loss = session.epoch(epoch, lr=0.01)

A `Trainer` is what is trained and how: net, data, settings, teacher. A `Session` is a training that
is under way: the optimizer, and the net in train mode. `Session.epoch` is the loop; what it calls
is in files of their own:

    terms.py        the terms of a batch's loss: criterion, distillation, mismatch of activations
    teacher.py      the teacher's logits, each computed once
    optimizers.py   the optimizer, and the bounds that keep learned quadratics small
    finite.py       whether losses and weights are finite
    precision.py    dtypes, memory layout and mixed precision
    graphs.py       forward and backward as CUDA graphs
    parallel.py     several ranks: averaged gradients and statistics
    checks.py       what is refused before anything is trained

Callers add to the loss by `penalty`, change the net between batches by `before_batch`, choose the
learning rate of each epoch, and save by `Session.state` after any epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastbcd.data.for_net import data_for
from fastbcd.graph.fuse import fused
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runtime import ranks
from fastbcd.runtime.malloc import kept_memory
from fastbcd.runtime.module_mode import train_mode
from fastbcd.scoring.metric import Loss, at_least_float32
from fastbcd.training import optimizers, parallel, precision
from fastbcd.training.checks import check_settings, check_trainable
from fastbcd.training.finite import Losses
from fastbcd.training.graphs import Replayed
from fastbcd.training.mismatch import site_outputs, sites_of
from fastbcd.training.rates import batches_of
from fastbcd.training.settings import Finetune
from fastbcd.training.teacher import Answer, TeacherLogits, teacher_logits
from fastbcd.training.terms import batch_loss

NET = "net:"  # before the names of the net's tensors in `Session.state`


class Batch(NamedTuple):
    """This rank's part of a batch."""

    number: int  # counted from the first epoch
    images: Tensor
    labels: Tensor
    answer: Answer | None  # the teacher's
    size: int  # of the batch, over all ranks

    def weighted(self, loss: Tensor) -> Tensor:
        """The mean loss of this part, so that the mean over ranks is that of the batch."""
        if ranks.world() == 1:
            return loss
        return loss * (ranks.world() * len(self.images) / self.size)


class Trainer:
    """Trains a network in place; what `Finetuner` promises holds here.

    With several ranks each batch is split among them. A net in float16 or bfloat16 is trained in
    float32 and rounded at the end of the session; one in float64 is trained in float64. With a
    batch norm in train mode a last batch of a single sample per rank joins the batch before it.

    Args:
        net: trained in place.
        data: as in `bcd`.
        settings: all but epochs and lr, which the caller of `Session.epoch` chooses.
        teacher: a net to distil from, or its `TeacherLogits`, which trainers can share.
        seed: of shuffles, crops and flips.
        loss: a callable (outputs, targets); None: cross-entropy.
        fused_optimizer: take the optimizer's fused kernels.
    """

    def __init__(
        self,
        net: nn.Module,
        data: Any,
        settings: Finetune,
        teacher: nn.Module | TeacherLogits | None = None,
        *,
        seed: int = 0,
        loss: Loss | None = None,
        fused_optimizer: bool = True,
    ) -> None:
        self.net = net
        self.data = data_for(net, data)
        self.settings = settings
        self.seed = seed
        self.criterion = loss
        self.fused_optimizer = fused_optimizer
        check_settings(settings, self.data, seed)
        if not isinstance(teacher, TeacherLogits):
            check_trainable(net, self.data, settings, teacher, loss)
        self.teacher = teacher_logits(teacher, self.data, settings)
        self.dtype = precision.training_dtype(net)
        self.trained = {
            name: p for name, p in net.named_parameters() if p.requires_grad
        }
        self.model, self.memory_format = fused(net)  # on the net's own tensors
        if settings.sync_batch_norm:
            self.model = parallel.synchronised(self.model, net, self.data.device)
        if settings.compile:
            self.model.compile()

    @property
    def sizes(self) -> list[int]:
        """The sizes of an epoch's batches, over all ranks."""
        smallest = parallel.smallest_batch(self.net)
        return self.data.sizes(self.settings.batch_size, smallest)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A new optimizer; on exit modes, dtypes and memory formats are as they were."""
        callers_autocast_off = torch.autocast(self.data.device.type, enabled=False)
        with (
            kept_memory(),
            callers_autocast_off,
            train_mode(self.net, self.model),
            precision.wide(self.net),
            precision.laid_out(self.net, self.memory_format),
        ):
            try:
                yield Session(self)
            finally:
                self.net.zero_grad(set_to_none=True)

    def batches(self, epoch: int, step: int, share: float) -> Iterator[Batch]:
        """This rank's part of the first batches of an epoch, a share of them."""
        sizes = self.sizes
        count = batches_of(share, len(sizes))
        numbers = {"seed": self.seed, "step": step, "epoch": epoch}
        answer_of = None
        if self.teacher is not None:
            answer_of = self.teacher.answers(sum(sizes[:count]), **numbers)
        parts = self.data.train_batches(
            self.settings.batch_size,
            **numbers,
            padding=self.settings.padding,
            flip=self.settings.flip,
            augment=self.settings.augment,
            rank=ranks.rank(),
            world=ranks.world(),
            smallest=parallel.smallest_batch(self.net),
            memory_format=self.memory_format,
            dtype=self.dtype,
        )
        first = epoch * len(sizes)
        for number, (images, labels, samples, _) in enumerate(islice(parts, count)):
            answer = None
            if answer_of is not None:
                answer = answer_of(images, samples)
            yield Batch(first + number, images, labels, answer, sizes[number])


class Session:
    """A training under way; made by `Trainer.session`."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.optimizer = optimizers.make_optimizer(
            trainer.net, trainer.trained, trainer.settings, trainer.fused_optimizer
        )
        self.quadratics = optimizers.bounded_quadratics(trainer.net, trainer.settings)
        # The sites whose activations are compared with the teacher's.
        self.sites: list[nn.Module] = []
        if trainer.settings.mismatch:
            self.sites = sites_of(trainer.model)
        self.model = parallel.averaged(
            trainer.model, unused=trainer.model is trainer.net
        )
        device = trainer.data.device
        self.half = precision.autocast_dtype(trainer.settings, device)
        plain = ranks.world() == 1 and not (self.sites or trainer.settings.compile)
        self.outputs = Replayed(
            self.model, self.half, capture=plain and device.type == "cuda"
        )

    def epoch(
        self,
        epoch: int,
        lr: float,
        *,
        step: int = 0,
        share: float = 1.0,
        penalty: Callable[[], Tensor] | None = None,
        before_batch: Callable[[int], None] | None = None,
        bar: Any = None,
    ) -> float:
        """Train on every sample once; returns the mean loss of the batches.

        Args:
            epoch, step: their numbers, which select the shuffle, the crops and the flips.
            lr: the learning rate.
            share: of the epoch's batches, the first ones; at least one batch.
            penalty: a term that is added to the loss of every batch.
            before_batch: called with the number of the batch, counted from the first epoch.
            bar: a tqdm to update after each batch.
        """
        clip = self.trainer.settings.clip
        optimizers.set_rate(self.optimizer, lr)
        # A new one in each epoch, so that a resumed training scales the loss in the same way.
        scaler = precision.scaler(self.half, self.trainer.data.device)
        losses = Losses(self.trainer.trained, scaler, f"epoch {epoch}, step {step}")
        if before_batch is not None:  # it may move tensors of the net
            self.outputs.capture = False
        for batch in self.trainer.batches(epoch, step, share):
            if before_batch is not None:
                before_batch(batch.number)
            loss = self.loss(batch)
            if penalty is not None:
                loss = loss + penalty()
            self.optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(self.optimizer)
            with optimizers.bounded(self.quadratics):
                if clip:
                    nn.utils.clip_grad_norm_(self.trainer.trained.values(), clip)
                scaler.step(self.optimizer)
            scaler.update()
            losses.add(loss, batch.size)
            if bar is not None:
                bar.update()
        parallel.agree_on_statistics(self.trainer.net)
        return losses.mean()

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a batch, a tensor []."""
        images = batch.images
        with site_outputs(self.sites) as activations:
            outputs = self.outputs(images)
        loss = batch_loss(
            tree_map_only(Tensor, at_least_float32, outputs),
            batch.labels,
            answer=batch.answer,
            activations=activations,
            settings=self.trainer.settings,
            criterion=self.trainer.criterion,
        )
        return batch.weighted(loss)

    def state(self) -> dict[str, Tensor]:
        """Copies of the net's and the optimizer's tensors, by name, on the CPU."""
        net = snapshots.take(self.trainer.net)
        return self.optimizer_state() | {
            NET + name: tensor for name, tensor in net.items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        net: dict[str, Tensor] = {}
        optimizer: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if name.startswith(NET):
                net[name.removeprefix(NET)] = tensor
            else:
                optimizer[name] = tensor
        snapshots.restore(self.trainer.net, net)
        self.load_optimizer(optimizer)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Copies of the optimizer's tensors, named kind.parameter, such as exp_avg.conv.weight."""
        return optimizers.state_of(self.optimizer, self.trainer.trained)

    def load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `optimizer_state` returned."""
        optimizers.load_state(self.optimizer, self.trainer.trained, tensors)
