"""collapsed: hypotheses scored on an affine map with kinks (form.py) instead of on the net.

Exact up to rounding, and cheap when few ReLUs are left: a hypothesis costs one number of H for
each pair of kept ReLUs, whatever the convolutions would cost. For a chunk of T hypotheses and B
images, c [R, T·B] is filled site by site; a site is a range of its rows:

    z_s = (U x + u)_s + H_sᵀ c[before s]             one GEMM for all trials and images
    c_s = m_s · relu(-z_s)                           one fused pass over its output

The logits are z of the last target.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fastbcd.ops.kink import kink
from fastbcd.runtime.tf32 import products
from fastbcd.scoring.collapsed.affine_cache import AffineCache
from fastbcd.scoring.collapsed.affine_net import AffineNet
from fastbcd.scoring.collapsed.form import Form, find
from fastbcd.scoring.collapsed.linear import NotAffine
from fastbcd.scoring.engine import Request, difference_from_net


class TrialGroup(NamedTuple):
    """Hypotheses that run together."""

    numbers: list[int]
    masks: Tensor  # uint8 [R, T]


class Collapsed:
    """The engine: the form of a net, and memory that every chunk uses again."""

    name = "collapsed"
    memory_format = torch.channels_last
    fast = "tf32"  # 8 bits are too few for large terms that cancel

    def __init__(self, form: Form, net: AffineNet, cache: AffineCache) -> None:
        self.form = form
        self.net = net
        self.cache = cache
        self.memory = form.constant.new_empty(0)

    def prepare(self, removals: dict[int, Tensor], lanes: int) -> list[TrialGroup]:
        """Hypotheses by number, in groups of at most `lanes`."""
        form = self.form
        numbers = [number for number, ids in removals.items() if len(ids)]
        groups = []
        for i in range(0, len(numbers), lanes):
            together = numbers[i : i + lanes]
            masks = torch.ones(form.kinks, len(together), dtype=torch.uint8)
            for trial, number in enumerate(together):
                masks[find(form.ids, removals[number]), trial] = 0
            groups.append(TrialGroup(together, masks.to(form.constant.device)))
        return groups

    def logits(
        self,
        x: Tensor,
        groups: list[TrialGroup],
        base: bool,
        images: Tensor | None = None,
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(numbers, logits [n, B, ...]) of every hypothesis, and of the base as number -1."""
        affine = self.affine_part(x, images)
        if base:
            everything = torch.ones(
                self.form.kinks, 1, dtype=torch.uint8, device=x.device
            )
            yield [-1], self.run(affine, everything)
        for numbers, masks in groups:
            yield numbers, self.run(affine, masks)

    def affine_part(self, x: Tensor, images: Tensor | None) -> Tensor:
        """U x + u at the kinks and the logits, [R + classes, B]; cached if x has numbers."""
        if images is None:
            return self.compute(x)
        return self.cache.values(images, x, self.compute)

    def compute(self, x: Tensor) -> Tensor:
        """U x + u at the kinks and the logits, [R + classes, B], in float32."""
        form = self.form
        with products(tf32=False):
            if form.image is None:
                return self.net.values_at(form.places, form.bounds, x)
            pixels = x.movedim(1, -1).flatten(1).T
            return torch.addmm(form.constant[:, None], form.image.T, pixels)

    def run(self, affine: Tensor, masks: Tensor) -> Tensor:
        """Logits [T, B, ...] of T masks, given U x + u [R + classes, B]."""
        form = self.form
        kinks, trials = masks.shape
        batch = affine.shape[1]
        if len(self.memory) < kinks * trials * batch:
            self.memory = affine.new_empty(kinks * trials * batch)
        c = self.memory[: kinks * trials * batch].view(kinks, trials * batch)
        for s, (low, high) in enumerate(pairwise(form.bounds[:-1])):
            if low == high:
                continue
            site = slice(low, high)
            if low:
                product(form.responses[s], c[:low], out=c[site])
            z = c[site].unflatten(1, (trials, batch))
            if form.lines is None:
                kink(z, affine[site], masks[site], fresh=not low)
                continue
            if not low:
                z.zero_()
            kink_beside_line(z, affine[site], masks[site], form.lines[:, site])
        logits = affine[kinks:].repeat(1, trials)
        logits += product(form.responses[-1], c, out=torch.empty_like(logits))
        return logits.T.reshape(trials, batch, *self.net.output_shape)

    def check(self, request: Request) -> None:
        """Refuse a form that gives other logits than the net."""
        error = difference_from_net(self, request, lanes=2)
        if not error <= request.tolerance:
            raise NotAffine(
                f"its logits differ by {error:.1e} of the largest from those of its collapsed form"
            )


def product(matrix: Tensor, c: Tensor, out: Tensor) -> Tensor:
    """matrix @ c, by oneDNN where that has wider vectors than MKL.

    On an AMD EPYC with AVX-512, one core, oneDNN reaches 170 to 190 GFLOP/s, MKL 90 to 105.
    """
    on_cpu = matrix.device.type == "cpu" and matrix.dtype == torch.float32
    if on_cpu and matrix.numel() and has_onednn():
        linear = torch.ops.mkldnn._linear_pointwise
        return out.copy_(linear(matrix, c.T, None, "none", [], ""))
    return torch.mm(matrix, c, out=out)


@cache
def has_onednn() -> bool:
    """Does this CPU have AVX-512, and torch this operator?"""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def kink_beside_line(c: Tensor, affine: Tensor, masks: Tensor, line: Tensor) -> None:
    """c = mask · (relu(-z) + (1 - c1)·z - c0), in place, with z = c + affine.

    c [n, T, B], affine [n, B], masks [n, T], line [2, n]: c0 and 1 - c1.
    """
    c0, slope = line[:, :, None, None]
    z = c + affine.unsqueeze(1)
    kink(c, affine, masks, fresh=False)
    c += (slope * z - c0) * masks.unsqueeze(2)
