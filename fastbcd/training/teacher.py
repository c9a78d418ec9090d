"""The frozen teacher's logits: each view of each sample is computed at most once in a run.

A sample has (2·padding+1)²·2 views (162 for padding 4), so in a long run most logits of an epoch
are cached already. Cached and computed logits are equal to the last bit: the teacher always sees
batches of one shape, in which a row depends on its own image alone; the first call checks that.
With several ranks each computes and caches the logits of its part of the samples. Activations are
too large to cache: with `Finetune.mismatch`, which compares them, the teacher runs in every batch.
"""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.nn.functional as F
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


class TeacherLogits:
    """The teacher's logits by (sample, view), computed when they are first needed.

    Without settings.teacher_cache, half of the free memory is shared by the ranks of this machine.
    The teacher is copied, so later changes to it have no effect. matched: `of` also returns its
    activations, as it does with settings.mismatch.
    """

    def __init__(
        self, teacher: nn.Module, data: ImageData, settings: Finetune, *, matched: bool = False
    ) -> None:
        self.shape = first_outputs(teacher, data, "the teacher", 1).shape[1:]
        own = copy.deepcopy(teacher).eval().requires_grad_(False)
        self.data, self.padding, self.dtype = data, settings.padding, dtype_of(teacher)
        self.matched = matched or settings.mismatch > 0
        self.per_batch = data.streamed or settings.mismatch > 0
        own = with_sites(own, data) if self.matched else own
        self.teacher, self.memory_format = fused(own, train=False)
        self.batch, self.checked = BATCH, False  # halved where it does not fit
        rank, world = ranks.rank(), ranks.world()
        self.first = rank * len(data) // world
        self.samples = (rank + 1) * len(data) // world - self.first
        self.used = self.computed = 0  # rows of the cache; images that went through the teacher
        self.seconds = 0.0  # spent on logits
        views = data.view_count(self.padding)
        useful = self.samples * (views if settings.flip else views // 2)
        limit = 0 if self.per_batch else settings.teacher_cache
        if limit is None:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            limit = default_memory(torch.device("cpu")) // local
        room = (limit - 4 * self.samples * views) // (4 * self.shape.numel())
        self.capacity = max(0, min(useful, room))
        self.warned = self.capacity == useful
        # slots[sample, view]: the row of `rows` with its logits, or -1. Rows are filled in order;
        # the system allocates memory only for those that are written.
        shape = (self.samples if self.capacity else 0, views)
        self.slots = torch.full(shape, -1, dtype=torch.int32)
        self.rows = torch.empty(self.capacity, *self.shape)

    @torch.no_grad()
    def of(
        self, x: Tensor, use: Callable[[Tensor], Tensor] = direction
    ) -> tuple[Tensor, list[Tensor]]:
        """The logits of a batch and use(output) of each of its activations, not cached."""
        begin = time.perf_counter()
        order, seen = self.memory_format if x.ndim == 4 else torch.contiguous_format, []
        with ExitStack() as stack:
            if self.matched:
                seen = stack.enter_context(site_outputs(self.teacher, use))
            logits = self.teacher(x.to(self.dtype, memory_format=order)).float()
        self.seconds += time.perf_counter() - begin
        return logits, seen

    def epoch(self, views: Tensor, part: Tensor | None = None) -> Tensor:
        """The logits of every sample in its view, views int64 [N] -> [N, classes, ...].

        part: the indices of the samples that are needed; None: all. The others have zeros.
        """
        begin, everyone = time.perf_counter(), torch.zeros(len(self.data), *self.shape)
        mine = everyone[self.first : self.first + self.samples]
        sample = torch.arange(self.samples)
        if part is not None:
            here = part.cpu().sort().values - self.first
            sample = here[(here >= 0) & (here < self.samples)]
        view = views.cpu()[sample + self.first]
        if self.capacity:
            slots = self.slots[sample, view].long()
            known = slots >= 0
            mine[sample[known]] = self.rows[slots[known]]
            sample, view = sample[~known], view[~known]
        if len(sample):
            mine[sample] = self._compute(sample + self.first, view)
            self._cache(sample, view, mine[sample])
        everyone = ranks.all_sum(everyone.to(self.data.device))
        bad = (~everyone.isfinite().flatten(1).all(1)).nonzero().flatten()
        if len(bad):
            raise FloatingPointError(
                f"the teacher gives non-finite logits for sample {int(bad[0])} in view "
                f"{int(views[bad[0]])}; look at its weights"
            )
        self.seconds += time.perf_counter() - begin
        return everyone

    def _cache(self, sample: Tensor, view: Tensor, logits: Tensor) -> None:
        count, views = min(len(sample), self.capacity - self.used), self.slots.shape[1]
        if count < len(sample) and not self.warned:
            self.warned, needed = True, self.samples * views * 4 * (self.shape.numel() + 1)
            warnings.warn(
                f"the teacher's logits for {views} views of {self.samples} samples need "
                f"{needed / 2**20:,.0f} MiB and teacher_cache allows {self.capacity:,} of "
                f"{self.samples * views:,}: the rest is computed again in every epoch",
                RuntimeWarning,
                stacklevel=3,
            )
        rows = torch.arange(self.used, self.used + count)
        self.rows[rows] = logits[:count]
        if count:
            self.slots[sample[:count], view[:count]] = rows.int()
        self.used += count

    @torch.inference_mode()
    def _compute(self, samples: Tensor, views: Tensor) -> Tensor:
        """The teacher's logits for some views, in batches of one shape: [n, classes]."""
        samples, views = samples.to(self.data.device), views.to(self.data.device)
        self.computed += len(samples)
        why = ""  # the batch was halved
        while True:
            try:
                if self.checked or self._rows_are_independent(samples, views):
                    parts = zip(samples.split(self.batch), views.split(self.batch), strict=True)
                    logits = torch.cat([self._forward(s, v) for s, v in parts]).cpu()
                    break
                why = "its logits for an image change with its place in the batch"
            except torch.OutOfMemoryError as error:
                if self.batch == 1:
                    raise
                why = str(error).splitlines()[0]
            # Logits of another batch size may differ in the last bit: they are not kept.
            self.batch, self.checked, self.used = self.batch // 2, False, 0
            self.slots.fill_(-1)
        self.checked = True
        if why:
            number = "one" if self.batch == 1 else self.batch
            warn_once(f"images go through the teacher {number} at a time: {why}")
        return logits

    def _forward(self, samples: Tensor, views: Tensor) -> Tensor:
        """The logits of at most self.batch views, in a batch that is filled up with zeros."""
        x = self.data.views(
            samples, views, padding=self.padding, memory_format=self.memory_format, dtype=self.dtype
        )
        # Always the same strides: with one channel several count as channels_last, and which
        # convolution runs depends on them.
        n, order = len(x), self.memory_format if x.ndim == 4 else torch.contiguous_format
        shape = (self.batch, *x.shape[1:])
        filled = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order)
        filled[:n] = x
        filled[n:] = 0
        return self.teacher(filled)[:n].float()

    def _rows_are_independent(self, samples: Tensor, views: Tensor) -> bool:
        """Whether a row of a batch depends on its own image alone."""
        if self.batch == 1:
            return True
        samples, views = samples[: self.batch], views[: self.batch]
        half = (len(samples) + 1) // 2
        straight = self._forward(samples, views)
        turned = self._forward(samples.flip(0), views.flip(0)).flip(0)
        alone = self._forward(samples[half:], views[half:])
        same = torch.equal(straight, turned) and torch.equal(straight[half:], alone)
        return same or not straight.isfinite().all()  # `epoch` reports what is not finite


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
            logits = torch.cat([model.eval()(x).float() for x, _ in batches])
        return cls(logits, settings.temperature, settings.distill)

    def first(self, n: int) -> Distillation:
        """Of the first n images."""
        return self._replace(logits=self.logits[:n])


def distillation(outputs: Tensor, given: Tensor, temperature: float, weight: float) -> Tensor:
    """weight · T² · KL(softmax(t/T) ‖ softmax(s/T)), the mean over samples and positions.

    >>> logits = torch.tensor([[1.0, 2.0]])
    >>> float(distillation(logits, logits, 4.0, 1.0))
    0.0
    """
    student = F.log_softmax(outputs / temperature, 1)
    target = F.log_softmax(given / temperature, 1).to(student.dtype)
    divergence = F.kl_div(student, target, reduction="batchmean", log_target=True)
    return weight * temperature**2 / outputs[0, 0].numel() * divergence


def with_sites(teacher: nn.Module, data: ImageData) -> nn.Module:
    """The teacher, converted if it has no masked activations."""
    if any(isinstance(module, MaskedActivation) for module in teacher.modules()):
        return teacher
    return convert(teacher, next(data.batches(1, dtype=dtype_of(teacher)))[0])
