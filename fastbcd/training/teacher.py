"""The frozen teacher's logits: each view of each sample is computed at most once in a run.

A sample has (2·padding+1)²·2 views (162 for padding 4), so in a long run most logits of an epoch
are cached already. Cached and computed logits are equal to the last bit: the teacher always sees
batches of one shape, in which a row depends on its own image alone; the first call checks that.
With several ranks each computes and caches the logits of its part of the samples.

Activations are too large to cache, and an augmentation of the user's has no views: with
`Finetune.mismatch` or `Finetune.augment` the teacher runs in every batch.
"""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.graph.fuse import fused
from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.convert import convert
from fastbcd.runtime import ranks
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.limits import default_memory
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.warn_once import warn_once
from fastbcd.scoring.accuracy import first_outputs
from fastbcd.training.mismatch import direction, site_outputs
from fastbcd.training.settings import Finetune

BATCH = 128  # images per batch of the teacher


class Answer(NamedTuple):
    """The teacher's logits for a batch, and its activations or what is compared of them."""

    logits: Tensor
    activations: list[Tensor]


class TeacherLogits:
    """The teacher's logits by (sample, view), computed when they are first needed.

    The teacher is copied, so later changes to it have no effect. matched: `of` also returns its
    activations, as it does with settings.mismatch.
    """

    def __init__(
        self, teacher: nn.Module, data: ImageData, settings: Finetune, *, matched: bool = False
    ) -> None:
        self.data = data
        self.settings = settings
        self.dtype = dtype_of(teacher)
        self.shape = first_outputs(teacher, data, "the teacher", 1).shape[1:]
        self.matched = matched or settings.mismatch > 0
        frozen = copy.deepcopy(teacher).eval().requires_grad_(False)
        if self.matched:
            frozen = with_sites(frozen, data)
        self.model, self.memory_format = fused(frozen, train=False)
        rank = ranks.rank()
        world = ranks.world()
        self.first = rank * len(data) // world
        self.samples = (rank + 1) * len(data) // world - self.first
        self.per_batch = data.streamed or settings.mismatch > 0 or settings.augment is not None
        limit = settings.teacher_cache
        if self.per_batch:
            limit = 0
        views = data.view_count(settings.padding)
        self.cache = ViewCache(self.samples, views, self.shape, flip=settings.flip, limit=limit)
        self.batch = BATCH  # halved where it does not fit
        self.checked = False  # that rows of this batch are independent
        self.computed = 0  # images that went through the teacher
        self.seconds = 0.0  # spent on logits

    def answers(
        self, *, seed: int, step: int, epoch: int, images: int
    ) -> Callable[[Tensor, Tensor], Answer]:
        """A function (batch, its samples) -> Answer for an epoch of so many images."""
        if self.per_batch:
            return lambda batch, samples: self.of(batch)
        views = self.data.view_ids(
            seed=seed,
            step=step,
            epoch=epoch,
            padding=self.settings.padding,
            flip=self.settings.flip,
        )
        order = self.data.order(seed=seed, step=step, epoch=epoch)
        logits = self.epoch(views, order[:images])
        return lambda batch, samples: Answer(logits[samples], [])

    @torch.no_grad()
    def of(self, batch: Tensor, use: Callable[[Tensor], Tensor] = direction) -> Answer:
        """The logits of a batch and use(output) of each of its activations, not cached."""
        with self._timed(), ExitStack() as stack:
            activations: list[Tensor] = []
            if self.matched:
                activations = stack.enter_context(site_outputs(self.model, use))
            logits = self.model(batch.to(self.dtype, memory_format=self._format_of(batch)))
            return Answer(logits.float(), activations)

    def epoch(self, views: Tensor, samples: Tensor | None = None) -> Tensor:
        """The logits of samples in their views, views int64 [N] -> [N, classes, ...].

        samples: those that are needed; None: all. The others have zeros.
        """
        with self._timed():
            everyone = torch.zeros(len(self.data), *self.shape)
            mine = everyone[self.first : self.first + self.samples]
            rows = self._rows(samples)
            row_views = views.cpu()[rows + self.first]
            known, logits = self.cache.get(rows, row_views)
            mine[rows[known]] = logits
            if not known.all():
                rows = rows[~known]
                row_views = row_views[~known]
                mine[rows] = self._compute(rows + self.first, row_views)
                self.computed += len(rows)
                self.cache.add(rows, row_views, mine[rows])
            everyone = ranks.all_sum(everyone.to(self.data.device))
            _check_finite(everyone, views)
        return everyone

    def _rows(self, samples: Tensor | None) -> Tensor:
        """Which of this rank's samples are among these, in order, counted from its first."""
        if samples is None:
            return torch.arange(self.samples)
        rows = samples.cpu().sort().values - self.first
        return rows[(rows >= 0) & (rows < self.samples)]

    @torch.inference_mode()
    def _compute(self, samples: Tensor, views: Tensor, reason: str = "") -> Tensor:
        """The teacher's logits for some views, in batches of one shape: [n, classes].

        reason: why the batch was halved.
        """
        try:
            if self.checked or self._rows_are_independent(samples, views):
                parts = zip(samples.split(self.batch), views.split(self.batch), strict=True)
                logits = torch.cat([self._forward(*part) for part in parts]).cpu()
                self.checked = True
                if reason:
                    warn_once(f"images go through the teacher {self.batch} at a time: {reason}")
                return logits
            reason = "its logits for an image change with its place in the batch"
        except torch.OutOfMemoryError as error:
            if self.batch == 1:
                raise
            reason = str(error).splitlines()[0]
        # Logits of another batch size may differ in the last bit: they are not kept.
        self.batch //= 2
        self.checked = False
        self.cache.clear()
        return self._compute(samples, views, reason)

    def _forward(self, samples: Tensor, views: Tensor) -> Tensor:
        """The logits of at most self.batch views, in a batch that is filled up with zeros."""
        device = self.data.device
        images = self.data.views(
            samples.to(device),
            views.to(device),
            padding=self.settings.padding,
            memory_format=self.memory_format,
            dtype=self.dtype,
        )
        # Always the same strides: with one channel several count as channels_last, and which
        # convolution runs depends on them.
        filled = torch.empty(
            (self.batch, *images.shape[1:]),
            dtype=images.dtype,
            device=images.device,
            memory_format=self._format_of(images),
        )
        filled[: len(images)] = images
        filled[len(images) :] = 0
        return self.model(filled)[: len(images)].float()

    def _rows_are_independent(self, samples: Tensor, views: Tensor) -> bool:
        """Whether a row of a batch depends on its own image alone."""
        if self.batch == 1:
            return True
        samples = samples[: self.batch]
        views = views[: self.batch]
        half = (len(samples) + 1) // 2
        straight = self._forward(samples, views)
        turned = self._forward(samples.flip(0), views.flip(0)).flip(0)
        alone = self._forward(samples[half:], views[half:])
        same = torch.equal(straight, turned) and torch.equal(straight[half:], alone)
        return same or not straight.isfinite().all()  # `epoch` reports what is not finite

    def _format_of(self, images: Tensor) -> torch.memory_format:
        return self.memory_format if images.ndim == 4 else torch.contiguous_format

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin


class ViewCache:
    """Logits by (sample, view) in the host's memory, as many as its limit in bytes allows.

    Without a limit, half of the free memory is shared by the ranks of this machine.

    >>> cache = ViewCache(samples=3, views=2, shape=(1,), flip=True, limit=None)
    >>> cache.add(torch.tensor([2]), torch.tensor([1]), torch.tensor([[0.5]]))
    >>> cache.get(torch.tensor([0, 2]), torch.tensor([0, 1]))
    (tensor([False,  True]), tensor([[0.5000]]))
    """

    def __init__(
        self, samples: int, views: int, shape: tuple[int, ...], *, flip: bool, limit: int | None
    ) -> None:
        if limit is None:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            limit = default_memory(torch.device("cpu")) // local
        useful = samples * views
        if not flip:  # only even views are used
            useful //= 2
        numbers = torch.Size(shape).numel()
        room = (limit - 4 * samples * views) // (4 * numbers)
        self.capacity = max(0, min(useful, room))
        self.used = 0
        self.warning = ""
        if self.capacity < useful:
            needed = samples * views * 4 * (numbers + 1) / 2**20
            self.warning = (
                f"the teacher's logits for {views} views of {samples} samples need "
                f"{needed:,.0f} MiB and teacher_cache allows {self.capacity:,} of "
                f"{samples * views:,}: the rest is computed again in every epoch"
            )
        # slots[sample, view]: the row of `rows` with its logits, or -1. Rows are filled in order;
        # the system allocates memory only for those that are written.
        if not self.capacity:
            samples = 0
        self.slots = torch.full((samples, views), -1, dtype=torch.int32)
        self.rows = torch.empty(self.capacity, *shape)

    def get(self, samples: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        """Which of them are known, bool [n], and the logits of those."""
        if not self.capacity:
            return torch.zeros(len(samples), dtype=torch.bool), self.rows
        slots = self.slots[samples, views].long()
        known = slots >= 0
        return known, self.rows[slots[known]]

    def add(self, samples: Tensor, views: Tensor, logits: Tensor) -> None:
        """Keep the logits of views that are not known, the first ones that fit."""
        count = min(len(samples), self.capacity - self.used)
        if count < len(samples) and self.warning:
            warnings.warn(self.warning, RuntimeWarning, stacklevel=4)
            self.warning = ""
        if count:
            rows = torch.arange(self.used, self.used + count)
            self.rows[rows] = logits[:count]
            self.slots[samples[:count], views[:count]] = rows.int()
            self.used += count

    def clear(self) -> None:
        """Forget everything."""
        self.used = 0
        self.slots.fill_(-1)


class Distillation(NamedTuple):
    """A teacher's logits for some images [N, classes, ...], and how an answer is compared."""

    logits: Tensor
    temperature: float = Finetune.temperature
    weight: float = Finetune.distill

    @classmethod
    def of(cls, teacher: nn.Module, data: ImageData, settings: Finetune) -> Distillation:
        """The teacher's logits for the images as they are, with the settings' T and weight."""
        model, layout = fused(teacher, train=False)
        with eval_mode(teacher), torch.no_grad():
            batches = data.batches(BATCH, memory_format=layout, dtype=dtype_of(teacher))
            logits = torch.cat([model.eval()(images).float() for images, _ in batches])
        return cls(logits, settings.temperature, settings.distill)

    def first(self, n: int) -> Distillation:
        """Of the first n images."""
        return self._replace(logits=self.logits[:n])


def with_sites(teacher: nn.Module, data: ImageData) -> nn.Module:
    """The teacher, converted if it has no masked activations."""
    if any(isinstance(module, MaskedActivation) for module in teacher.modules()):
        return teacher
    return convert(teacher, next(data.batches(1, dtype=dtype_of(teacher)))[0])


def _check_finite(logits: Tensor, views: Tensor) -> None:
    """Refuse logits [N, classes, ...] that are not finite, naming the first sample and its view."""
    bad = (~logits.isfinite().flatten(1).all(1)).nonzero().flatten()
    for sample in bad[:1].tolist():
        raise FloatingPointError(
            f"the teacher gives non-finite logits for sample {sample} in view "
            f"{int(views[sample])}; look at its weights"
        )
