"""The frozen teacher's logits: each view of each sample is computed at most once in a run.

A sample has (2·padding+1)²·2 views (162 for padding 4), so in a long run most logits of an epoch
are cached already. Cached and computed logits are equal to the last bit: the teacher always sees
batches of one shape, in which a row depends on its own image alone. With several ranks each
computes and caches the logits of its part of the samples.

The teacher runs in every batch where that is not so, and a warning says it; where activations are
compared (`Finetune.mismatch`), which are too large to cache; where the user's own augmentation
has no views; and where an epoch's logits take too much memory.

It runs with batch norm folded into convolutions and in the training's precision. A small ResNet
with 75 % of its ReLUs removed, after 4 epochs of 7,600 images of Fashion-MNIST, with two seeds:
76.25 and 69.75 % of 400 test images with the teacher as it is; 76.0 and 69.75 with it folded, and
the same in bfloat16.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.graph.fold import folded
from fastbcd.graph.fuse import fused
from fastbcd.graph.trace import logits_of
from fastbcd.masking.activations import MaskedActivation
from fastbcd.masking.convert import convert
from fastbcd.runtime import ranks
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.limits import default_memory
from fastbcd.runtime.warn_once import warn_once
from fastbcd.training.mismatch import direction, site_outputs, sites_of
from fastbcd.training.precision import autocast_dtype, mixed
from fastbcd.training.settings import Finetune

BATCH = 128  # images per batch of the teacher
LARGE = 2**30  # bytes of an epoch's logits that are cached at most; ImageNet has 5.1 GB


class Answer(NamedTuple):
    """The teacher's logits for a batch, and its activations or what is compared of them."""

    logits: Tensor
    activations: list[Tensor]


class FrozenNet:
    """A copy of a net for inference, with batch norm folded into convolutions.

    half: of mixed precision, or None. matched: its activations are wanted too.
    """

    def __init__(
        self,
        net: nn.Module,
        data: ImageData,
        *,
        half: torch.dtype | None = None,
        matched: bool = False,
    ) -> None:
        self.dtype = dtype_of(net)
        self.half = half
        frozen = copy.deepcopy(net).eval().requires_grad_(False)
        if matched:
            frozen = with_sites(frozen, data)
        self.model, self.layout = fused(folded(frozen), train=False)
        for module in self.model.modules():
            if half is not None and isinstance(module, nn.Conv2d | nn.Linear):
                module.to(half)  # once, and not in each batch as autocast would
        if data.images.ndim != 4:
            self.layout = torch.contiguous_format
        self.sites: list[nn.Module] = []
        if matched:
            self.sites = sites_of(self.model)

    @torch.no_grad()
    def of(self, batch: Tensor, use: Callable[[Tensor], Tensor] = direction) -> Answer:
        """The logits of a batch and use(output) of each of its activations."""
        with (
            mixed(self.half, batch.device),
            site_outputs(self.sites, use) as activations,
        ):
            outputs = self.model(batch.to(self.dtype, memory_format=self.layout))
        return Answer(logits_of(outputs).float(), activations)

    def rows(self, images: Tensor) -> Tensor:
        """The logits of at most BATCH images, in a batch that is filled up with zeros."""
        # Always the same strides: with one channel several count as channels_last, and which
        # convolution runs depends on them.
        filled = torch.empty(
            (BATCH, *images.shape[1:]),
            dtype=self.dtype,
            device=images.device,
            memory_format=self.layout,
        )
        filled[: len(images)] = images
        filled[len(images) :] = 0
        return self.of(filled).logits[: len(images)]

    def rows_are_independent(self, images: Tensor) -> bool:
        """Whether logits stay the same in another order of the images, and for a part of them."""
        half = (len(images) + 1) // 2
        straight = self.rows(images)
        turned = self.rows(images.flip(0)).flip(0)
        part = self.rows(images[half:])
        if not straight.isfinite().all():
            return True  # `epoch` reports it, with sample and view
        return torch.equal(straight, turned) and torch.equal(straight[half:], part)


class TeacherLogits:
    """The teacher's logits by (sample, view), computed when they are first needed.

    matched: `net.of` also returns its activations, as it does with settings.mismatch.
    """

    def __init__(
        self,
        teacher: nn.Module,
        data: ImageData,
        settings: Finetune,
        *,
        matched: bool = False,
    ) -> None:
        self.data = data
        self.settings = settings
        self.net = FrozenNet(
            teacher,
            data,
            half=autocast_dtype(settings, data.device),
            matched=matched or settings.mismatch > 0,
        )
        images = next(data.batches(BATCH, dtype=self.net.dtype))[0]
        self.shape = self.net.of(images[:1]).logits.shape[1:]
        self.computed = 0  # images that went through the teacher to be cached
        self.cache = torch.empty(0)
        # bool [slots, views]: whose logits are in the cache; None: nothing is cached.
        self.known: Tensor | None = None
        each = 4 * self.shape.numel()  # bytes
        if settings.mismatch or not settings.distill or settings.augment is not None:
            return
        if len(data) * each > LARGE:
            return
        dependent = torch.tensor(int(not self.net.rows_are_independent(images)))
        if ranks.all_sum(dependent):
            warn_once(
                "the teacher runs in every batch, and nothing is cached: its logits for an image "
                "change with its place in the batch"
            )
            return
        views = data.view_count(settings.padding)
        slots = math.ceil(len(data) / ranks.world())  # of this rank's samples
        self.known = torch.zeros(slots, views, dtype=torch.bool)
        fitting = _fitting(slots, views * (each + 1), settings.teacher_cache)
        # Its unused parts cost nothing.
        self.cache = torch.empty(fitting, views, *self.shape)

    def answers(
        self, images: int, **numbers: int
    ) -> Callable[[Tensor, Tensor], Answer | None]:
        """A function (batch, its samples) -> Answer for an epoch of so many images.

        numbers: seed, step and epoch.
        """
        if self.settings.distill == self.settings.mismatch == 0:
            return lambda batch, samples: None
        if self.known is None:
            return lambda batch, samples: self.net.of(batch)
        views = self.data.view_ids(
            **numbers, padding=self.settings.padding, flip=self.settings.flip
        )
        logits = self.epoch(views, self.data.order(**numbers)[:images])
        return lambda batch, samples: Answer(logits[samples], [])

    def epoch(self, views: Tensor, samples: Tensor) -> Tensor:
        """The logits of samples in their views, views int64 [N] -> [N, classes, ...].

        samples: those that are needed. The others have zeros.
        """
        everyone = torch.zeros(len(self.data), *self.shape)
        samples = samples.cpu().sort().values
        mine = samples[samples % ranks.world() == ranks.rank()]
        everyone[mine] = self._cached(mine, views.cpu()[mine])
        everyone = ranks.all_sum(everyone.to(self.data.device))
        wrong = (~everyone.isfinite()).flatten(1).any(1).nonzero()
        if len(wrong):
            sample = int(wrong[0])
            raise FloatingPointError(
                f"the teacher gives non-finite logits for sample {sample} in view "
                f"{int(views[sample])}; look at its weights"
            )
        return everyone

    def _cached(self, samples: Tensor, views: Tensor) -> Tensor:
        """The logits of this rank's samples; new ones are computed, and kept if they fit."""
        assert self.known is not None
        slots = samples // ranks.world()
        known = self.known[slots, views]
        logits = torch.empty(len(samples), *self.shape)
        logits[known] = self.cache[slots[known], views[known]]
        if not known.all():
            logits[~known] = self._compute(samples[~known], views[~known])
            fit = slots < len(self.cache)
            self.cache[slots[fit], views[fit]] = logits[fit]
            self.known[slots[fit], views[fit]] = True
        return logits

    def _compute(self, samples: Tensor, views: Tensor) -> Tensor:
        """The teacher's logits for views, in batches of one shape: [n, classes, ...]."""
        self.computed += len(samples)
        samples = samples.to(self.data.device)
        views = views.to(self.data.device)
        logits = []
        options: Any = {"padding": self.settings.padding, "dtype": self.net.dtype}
        parts = zip(samples.split(BATCH), views.split(BATCH), strict=True)
        for part, part_views in parts:
            images = self.data.views(part, part_views, **options)
            logits.append(self.net.rows(images))
        return torch.cat(logits).cpu()


def teacher_logits(
    teacher: nn.Module | TeacherLogits | None, data: ImageData, settings: Finetune
) -> TeacherLogits | None:
    """What a training with these settings needs of its teacher."""
    if isinstance(teacher, nn.Module):
        if settings.distill == settings.mismatch == 0:
            return None
        return TeacherLogits(teacher, data, settings)
    if settings.mismatch and teacher is None:
        raise ValueError(f"mismatch={settings.mismatch} needs a teacher: give one")
    return teacher


def _fitting(slots: int, each: int, limit: int | None) -> int:
    """How many slots of so many bytes the host's memory has room for."""
    if limit is None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks of this machine
        limit = default_memory(torch.device("cpu")) // here
    fitting = min(slots, limit // each)
    if fitting < slots:
        warnings.warn(
            f"the teacher's logits for all views of {slots:,} samples need "
            f"{slots * each / 2**20:,.0f} MiB and teacher_cache allows {fitting:,} samples: those "
            f"of the others are computed again in every epoch",
            RuntimeWarning,
            stacklevel=6,
        )
    return fitting


class Distillation(NamedTuple):
    """A teacher's logits for some images [N, classes, ...], and how an answer is compared."""

    logits: Tensor
    temperature: float = Finetune.temperature
    weight: float = Finetune.distill

    @classmethod
    def of(
        cls, teacher: nn.Module, data: ImageData, settings: Finetune
    ) -> Distillation:
        """The teacher's logits for the images as they are, with the settings' T and weight."""
        net = FrozenNet(teacher, data)
        batches = data.batches(BATCH, dtype=net.dtype)
        logits = torch.cat([net.of(images).logits for images, _ in batches])
        return cls(logits, settings.temperature, settings.distill)

    def first(self, n: int) -> Distillation:
        """Of the first n images."""
        return self._replace(logits=self.logits[:n])


def with_sites(teacher: nn.Module, data: ImageData) -> nn.Module:
    """The teacher, converted if it has no masked activations."""
    if any(isinstance(module, MaskedActivation) for module in teacher.modules()):
        return teacher
    return convert(teacher, next(data.batches(1, dtype=dtype_of(teacher)))[0])
