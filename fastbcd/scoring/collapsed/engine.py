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

    def __init__(self, form: Form, builder: FormBuilder, shape: tuple[int, ...] = (-1,)) -> None:
        """shape: of the outputs for one image, which the form has as one row."""
        self.form, self.builder, self.shape = form, builder, shape
        # A restricted form keeps its order of kinks; the builder's tiles may differ by now.
        self.order: Tensor | None = None
        if not torch.equal(form.ids, builder.ids):
            logits = torch.arange(builder.bounds[-2], builder.bounds[-1])
            self.order = torch.cat([find(builder.ids, form.ids), logits]).to(form.constant.device)
        self.memory = form.constant.new_empty(0)

    def prepare(self, removals: dict[int, Tensor], lanes: int) -> list[TrialGroup]:
        """Hypotheses by number, in groups of at most `lanes` that begin near each other."""
        form, bounds = self.form, self.form.bounds
        gone = {k: find(form.ids, ids) for k, ids in removals.items() if len(ids)}
        first = {k: bounds[bisect(bounds, int(kinks.min())) - 1] for k, kinks in gone.items()}
        order = sorted(gone, key=first.__getitem__)
        groups = []
        for i in range(0, len(order), lanes):
            numbers = order[i : i + lanes]
            start = first[numbers[0]]
            masks = torch.ones(form.kinks - start, len(numbers), dtype=torch.uint8)
            for t, k in enumerate(numbers):
                masks[gone[k] - start, t] = 0
            groups.append(TrialGroup(numbers, start, masks.to(form.constant.device)))
        return groups

    def logits(
        self, x: Tensor, groups: list[TrialGroup], base: bool, images: Tensor | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(numbers, logits [n, B, classes]) of every hypothesis, and of the base as number -1."""
        affine = self.affine_part(x, images)
        c = None
        if base or any(group.start for group in groups):
            everything = torch.ones(self.form.kinks, 1, dtype=torch.uint8, device=x.device)
            c, logits = self.run(affine, everything, 0)
            c = c.clone()  # the memory is used again
            if base:
                yield [-1], logits
        shifted = {0: affine}
        for numbers, start, masks in groups:
            if start not in shifted:
                assert c is not None
                shifted[start] = self.shift(affine, c[:start])
            yield numbers, self.run(shifted[start], masks, start)[1]

    def affine_part(self, x: Tensor, images: Tensor | None) -> Tensor:
        """U x + u at the kinks and the logits, [R + classes, B]; cached if x has numbers."""
        if images is None:
            return self.compute(x)
        return self.form.affine.values(images, x, self.compute)

    def compute(self, x: Tensor) -> Tensor:
        """U x + u at the kinks and the logits, [R + classes, B]."""
        form = self.form
        if form.image is not None:
            pixels = x.movedim(1, -1).flatten(1).T
            return torch.addmm(form.constant[:, None], form.image.T, pixels)
        z = self.builder.affine_part(x)
        return z if self.order is None else z.index_select(0, self.order)

    def run(self, affine: Tensor, masks: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """c [R - start, T·B] and logits [T, B, classes] of T masks over the kinks from `start`.

        affine [R - start + classes, B]: what the image and earlier kinks give.
        """
        form, trials, batch = self.form, masks.shape[1], affine.shape[1]
        numbers = len(masks) * trials * batch
        if len(self.memory) < numbers:
            self.memory = affine.new_empty(numbers)
        c = self.memory[:numbers].view(len(masks), trials * batch)
        for s, (low, high) in enumerate(pairwise(form.bounds[:-1])):
            if start <= low < high:
                some = slice(low - start, high - start)
                fresh = not self.add_kinks(c[some], s, c, start, beta=0)
                z = c[some].unflatten(1, (trials, batch))
                more = self.beyond(z, affine[some], masks[some], fresh, slice(low, high))
                kink(z, affine[some], masks[some], fresh=fresh)
                if more is not None:
                    z += more
        logits = affine[len(masks) :].repeat(1, trials)
        self.add_kinks(logits, len(form.blocks) - 1, c, start, beta=1)
        return c, logits.T.reshape(trials, batch, *self.shape)

    def beyond(
        self, c: Tensor, a: Tensor, masks: Tensor, fresh: bool, kinks: slice
    ) -> Tensor | None:
        """mask · ((1 - c1)·z - c0), what a kept ReLU adds to a line beside its kink, [n, T, B].

        The arguments are those of `kink`, and the numbers of the kinks.
        """
        if self.form.lines is None:
            return None
        c0, slope = self.form.lines[:, kinks, None, None]
        z = a.unsqueeze(1).expand_as(c) if fresh else c + a.unsqueeze(1)
        return (slope * z - c0) * masks.unsqueeze(2)

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
            low, high = max(block.start, first), min(block.stop, last)
            if low < high:
                rows = block.matrix[low - block.start : high - block.start]
                torch.addmm(z, rows.T, c[low - first : high - first], beta=beta, out=z)
                beta = 1
        return beta

    def check(self, request: Request) -> None:
        """Compare logits with those of the net, from what is cached too."""
        error = difference_from_net(self, request, lanes=1)
        for block, (x, _) in list(self.form.affine.entries.items())[:1]:
            ((_, logits),) = self.logits(x, [], True, self.form.affine.numbers(block))
            truth = request.net(x[:2].clone())
            worst = (logits[0, :2] - truth).abs().max() / truth.abs().max().clamp(min=1e-6)
            error = max(error, float(worst.nan_to_num(nan=0.0)))
        if not error <= request.tolerance:
            raise NotAffine(
                f"its logits differ by {error:.1e} of the largest from those of its collapsed form"
            )
