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
import math
import os
import warnings
from collections.abc import Callable
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
from fastbcd.training.mismatch import direction, site_outputs, sites_of
from fastbcd.training.settings import Finetune

BATCH = 128  # images per batch of the teacher
LARGE = 2**30  # bytes of an epoch's logits (ImageNet: 5.1 GB): beyond, the teacher runs per batch


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
        matched = matched or settings.mismatch > 0
        frozen = copy.deepcopy(teacher).eval().requires_grad_(False)
        if matched:
            frozen = with_sites(frozen, data)
        self.model, self.layout = fused(frozen, train=False)
        if data.images.ndim != 4:
            self.layout = torch.contiguous_format
        self.sites: list[nn.Module] = []
        if matched:
            self.sites = sites_of(self.model)
        self.first = ranks.rank() * len(data) // ranks.world()
        self.samples = (ranks.rank() + 1) * len(data) // ranks.world() - self.first
        large = 4 * len(data) * self.shape.numel() > LARGE
        self.per_batch = large or settings.mismatch > 0 or settings.augment is not None
        if not self.per_batch:
            views = data.view_count(settings.padding)
            self.cache = ViewCache(self.samples, views, self.shape, settings.teacher_cache)
        self.batch = BATCH
        self.checked = False  # that rows of this batch are independent
        self.computed = 0  # images that went through the teacher

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
        with site_outputs(self.sites, use) as activations:
            logits = self.model(batch.to(self.dtype, memory_format=self.layout))
        return Answer(logits.float(), activations)

    def epoch(self, views: Tensor, samples: Tensor) -> Tensor:
        """The logits of samples in their views, views int64 [N] -> [N, classes, ...].

        samples: those that are needed. The others have zeros.
        """
        everyone = torch.zeros(len(self.data), *self.shape)
        mine = everyone[self.first : self.first + self.samples]
        rows = samples.cpu().sort().values - self.first
        rows = rows[(rows >= 0) & (rows < self.samples)]
        row_views = views.cpu()[rows + self.first]
        known, logits = self.cache.get(rows, row_views)
        mine[rows[known]] = logits
        if not known.all():
            rows = rows[~known]
            row_views = row_views[~known]
            mine[rows] = self._compute(rows + self.first, row_views)
            self.cache.add(rows, row_views, mine[rows])
        everyone = ranks.all_sum(everyone.to(self.data.device))
        _check_finite(everyone, views)
        return everyone

    @torch.inference_mode()
    def _compute(self, samples: Tensor, views: Tensor) -> Tensor:
        """The teacher's logits for views, in batches of one shape: [n, classes, ...]."""
        samples = samples.to(self.data.device)
        views = views.to(self.data.device)
        if not self.checked:
            self._take_independent_rows(samples, views)
        self.computed += len(samples)
        parts = zip(samples.split(self.batch), views.split(self.batch), strict=True)
        return torch.cat([self._forward(*part) for part in parts]).cpu()

    def _take_independent_rows(self, samples: Tensor, views: Tensor) -> None:
        """Halve the batch until a row of it depends on its own image alone."""
        while not self._rows_are_independent(samples[: self.batch], views[: self.batch]):
            self.batch //= 2
        self.checked = True
        if self.batch < BATCH:
            warn_once(
                f"images go through the teacher {self.batch} at a time: its logits for an image "
                f"change with its place in the batch"
            )

    def _rows_are_independent(self, samples: Tensor, views: Tensor) -> bool:
        """Whether the logits of a batch stay the same in another order, and for a part of it."""
        if self.batch == 1:
            return True
        half = (len(samples) + 1) // 2
        straight = self._forward(samples, views)
        turned = self._forward(samples.flip(0), views.flip(0)).flip(0)
        alone = self._forward(samples[half:], views[half:])
        same = torch.equal(straight, turned) and torch.equal(straight[half:], alone)
        return same or not straight.isfinite().all()  # `epoch` reports what is not finite

    def _forward(self, samples: Tensor, views: Tensor) -> Tensor:
        """The logits of at most self.batch views, in a batch that is filled up with zeros."""
        images = self.data.views(samples, views, padding=self.settings.padding, dtype=self.dtype)
        # Always the same strides: with one channel several count as channels_last, and which
        # convolution runs depends on them.
        filled = torch.empty(
            (self.batch, *images.shape[1:]),
            dtype=images.dtype,
            device=images.device,
            memory_format=self.layout,
        )
        filled[: len(images)] = images
        filled[len(images) :] = 0
        return self.model(filled)[: len(images)].float()


class ViewCache:
    """Logits by (sample, view) in the host's memory: of the first samples, as many as fit.

    limit: in bytes; None: half of the free memory, shared by the ranks of this machine.

    >>> cache = ViewCache(samples=3, views=2, shape=(1,), limit=None)
    >>> cache.add(torch.tensor([2]), torch.tensor([1]), torch.tensor([[0.5]]))
    >>> cache.get(torch.tensor([0, 2]), torch.tensor([0, 1]))
    (tensor([False,  True]), tensor([[0.5000]]))
    """

    def __init__(self, samples: int, views: int, shape: tuple[int, ...], limit: int | None) -> None:
        if limit is None:
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            limit = default_memory(torch.device("cpu")) // ranks_here
        each = views * (4 * math.prod(shape) + 1)  # bytes
        self.samples = min(samples, limit // each)
        if self.samples < samples:
            warnings.warn(
                f"the teacher's logits for {views} views of {samples:,} samples need "
                f"{samples * each / 2**20:,.0f} MiB and teacher_cache allows {self.samples:,} "
                f"samples: those of the others are computed again in every epoch",
                RuntimeWarning,
                stacklevel=5,
            )
        self.known = torch.zeros(self.samples, views, dtype=torch.bool)
        self.logits = torch.empty(self.samples, views, *shape)  # of which unused parts cost nothing

    def get(self, samples: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        """Which of them are known, bool [n], and the logits of those."""
        known = samples < self.samples
        known[known.clone()] = self.known[samples[known], views[known]]
        return known, self.logits[samples[known], views[known]]

    def add(self, samples: Tensor, views: Tensor, logits: Tensor) -> None:
        """Keep logits [n, ...], of the samples that fit."""
        fit = samples < self.samples
        self.known[samples[fit], views[fit]] = True
        self.logits[samples[fit], views[fit]] = logits[fit]


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
