"""collapsed: hypotheses scored on an affine map with kinks (form.py) instead of on the net.

Exact up to rounding, and cheap when few ReLUs are left: a hypothesis costs one number of H for
each pair of kept ReLUs, whatever the convolutions would cost. For a chunk of T hypotheses and B
images, c [R, T·B] is filled site by site; a site is a range of its rows:

    z_s = (U x + u)_s + H_sᵀ c[before s]             one GEMM for all trials and images
    c_s = m_s · relu(-z_s)                           one fused pass over its output

The logits are z of the last target. For hypotheses that begin at a later site, everything before
it is a shift of the affine part that is computed once, from the base.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fastbcd.ops.kink import kink
from fastbcd.scoring.collapsed.affine_cache import AffineCache
from fastbcd.scoring.collapsed.build import FormBuilder
from fastbcd.scoring.collapsed.form import Form, find
from fastbcd.scoring.collapsed.linear_rules import NotAffine
from fastbcd.scoring.engine import Request, difference_from_net


class TrialGroup(NamedTuple):
    """Hypotheses that run together, from kink `start` on: the first of the first changed site."""

    numbers: list[int]
    start: int
    masks: Tensor  # uint8 [R - start, T]


class Collapsed:
    """The engine: the form of a net, and memory that every chunk uses again."""

    name = "collapsed"
    memory_format = torch.channels_last

    def __init__(
        self,
        form: Form,
        builder: FormBuilder,
        *,
        cache: AffineCache | None = None,
        shape: tuple[int, ...] = (-1,),
    ) -> None:
        """shape: of the outputs for one image, which the form has as one row."""
        self.form = form
        self.builder = builder
        self.cache = cache or AffineCache()
        self.shape = shape
        # A form that has shrunk keeps its order of kinks; the builder's tiles may differ by now.
        self.order: Tensor | None = None
        if not torch.equal(form.ids, builder.ids):
            logits = torch.arange(builder.bounds[-2], builder.bounds[-1])
            order = torch.cat([find(builder.ids, form.ids), logits])
            self.order = order.to(form.constant.device)
        self.memory = form.constant.new_empty(0)

    def prepare(self, removals: dict[int, Tensor], lanes: int) -> list[TrialGroup]:
        """Hypotheses by number, in groups of at most `lanes` that begin near each other."""
        form = self.form
        removed = {k: find(form.ids, ids) for k, ids in removals.items() if len(ids)}
        first = {}
        for k, kinks in removed.items():
            site = bisect(form.bounds, int(kinks.min())) - 1
            first[k] = form.bounds[site]
        order = sorted(removed, key=first.__getitem__)
        groups = []
        for i in range(0, len(order), lanes):
            numbers = order[i : i + lanes]
            start = first[numbers[0]]
            masks = torch.ones(form.kinks - start, len(numbers), dtype=torch.uint8)
            for trial, k in enumerate(numbers):
                masks[removed[k] - start, trial] = 0
            groups.append(TrialGroup(numbers, start, masks.to(form.constant.device)))
        return groups

    def logits(
        self, x: Tensor, groups: list[TrialGroup], base: bool, images: Tensor | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(numbers, logits [n, B, classes]) of every hypothesis, and of the base as number -1."""
        affine = self.affine_part(x, images)
        starts = sorted({group.start for group in groups})
        shifted = {0: affine}
        if base or any(starts):
            everything = torch.ones(self.form.kinks, 1, dtype=torch.uint8, device=x.device)
            c, logits = self.run(affine, everything, 0)
            shifted |= {start: self.shift(affine, c[:start]) for start in starts if start}
            if base:
                yield [-1], logits
        for numbers, start, masks in groups:
            yield numbers, self.run(shifted[start], masks, start)[1]

    def affine_part(self, x: Tensor, images: Tensor | None) -> Tensor:
        """U x + u at the kinks and the logits, [R + classes, B]; cached if x has numbers."""
        if images is None:
            return self.compute(x)
        return self.cache.values(images, x, self.compute)

    def compute(self, x: Tensor) -> Tensor:
        """U x + u at the kinks and the logits, [R + classes, B]."""
        form = self.form
        if form.image is not None:
            pixels = x.movedim(1, -1).flatten(1).T
            return torch.addmm(form.constant[:, None], form.image.T, pixels)
        z = self.builder.affine_part(x)
        if self.order is None:
            return z
        return z.index_select(0, self.order)

    def run(self, affine: Tensor, masks: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """c [R - start, T·B] and logits [T, B, classes] of T masks over the kinks from `start`.

        affine [R - start + classes, B]: what the image and earlier kinks give. c lies in memory
        that the next run uses again.
        """
        form = self.form
        kinks, trials = masks.shape
        batch = affine.shape[1]
        c = self.new_kinks(kinks, trials * batch)
        for s, (low, high) in enumerate(pairwise(form.bounds[:-1])):
            if start <= low < high:
                site = slice(low - start, high - start)
                none_before = not self.add_kinks(c[site], s, c, start, beta=0)
                values = c[site].unflatten(1, (trials, batch))
                if form.lines is None:
                    kink(values, affine[site], masks[site], fresh=none_before)
                else:
                    if none_before:
                        values.zero_()
                    line = form.lines[:, low:high]
                    self.kink_beside_line(values, affine[site], masks[site], line)
        logits = affine[kinks:].repeat(1, trials)
        self.add_kinks(logits, len(form.blocks) - 1, c, start, beta=1)
        return c, logits.T.reshape(trials, batch, *self.shape)

    def new_kinks(self, kinks: int, columns: int) -> Tensor:
        """[kinks, columns] in the memory of the engine."""
        numbers = kinks * columns
        if len(self.memory) < numbers:
            self.memory = self.form.constant.new_empty(numbers)
        return self.memory[:numbers].view(kinks, columns)

    def kink_beside_line(self, c: Tensor, affine: Tensor, masks: Tensor, line: Tensor) -> None:
        """c = mask · (relu(-z) + (1 - c1)·z - c0), in place, with z = c + affine.

        c [n, T, B], affine [n, B], masks [n, T], line [2, n]: c0 and 1 - c1.
        """
        c0, slope = line[:, :, None, None]
        z = c + affine.unsqueeze(1)
        kink(c, affine, masks, fresh=False)
        c += (slope * z - c0) * masks.unsqueeze(2)

    def shift(self, affine: Tensor, c: Tensor) -> Tensor:
        """The affine part after the kinks of c, with what these add."""
        start = len(c)
        moved = affine[start:].clone()
        for s, (low, high) in enumerate(pairwise(self.form.bounds)):
            if low >= start:
                self.add_kinks(moved[low - start : high - start], s, c, 0, beta=1)
        return moved

    def add_kinks(self, z: Tensor, s: int, c: Tensor, first: int, beta: int) -> int:
        """z = beta·z + H_sᵀ c, with kinks from `first` on as rows of c; beta if none acts on s."""
        last = first + len(c)
        for block in self.form.blocks[s]:
            low = max(block.start, first)
            high = min(block.stop, last)
            if low < high:
                rows = block.matrix[low - block.start : high - block.start]
                torch.addmm(z, rows.T, c[low - first : high - first], beta=beta, out=z)
                beta = 1
        return beta

    def check(self, request: Request) -> None:
        """Refuse a form that gives other logits than the net."""
        error = difference_from_net(self, request, lanes=2)
        if not error <= request.tolerance:
            raise NotAffine(
                f"its logits differ by {error:.1e} of the largest from those of its collapsed form"
            )
