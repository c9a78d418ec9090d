"""What a call costs: multiply-adds of stacked, and of collapsed with and without its build.

A multiply-add is not the same everywhere: the weights say how much longer it takes than one of
stacked's convolutions, as measured (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from fastbcd.scoring.collapsed.affine_net import IMAGE
from fastbcd.scoring.collapsed.build import Builder
from fastbcd.scoring.collapsed.engine import form_at_hand, make_builder
from fastbcd.scoring.collapsed.form import Form
from fastbcd.scoring.program import Program
from fastbcd.scoring.stacked import Lanes, first_change

if TYPE_CHECKING:
    from fastbcd.scoring.plan import Request

BUILD_WEIGHT = 1.3  # impulses: small images, many shapes
GEMM_WEIGHT = 1.0
# By net: multiply-adds of an impulse, which its masks hardly change.
_impulse_costs: weakref.WeakKeyDictionary[nn.Module, dict] = weakref.WeakKeyDictionary()


def stacked_multiply_adds(request: Request, program: Program) -> int:
    """Of the base and all hypotheses, each from its first changed site on, over all images."""
    begins = [first_change(request.masks, ids) for ids in request.removals]
    lanes = Lanes(program, begins, list(range(len(begins))))
    of_lanes = sum(program.multiply_adds[node] * n for node, n in lanes.count.items())
    of_all = of_lanes * request.hypotheses // max(len(begins), 1)
    return (sum(program.multiply_adds.values()) + of_all) * request.images


class Bill:
    """What collapsed would cost for one request; `NotAffine` says why it cannot serve."""

    def __init__(self, request: Request, program: Program) -> None:
        self.builder: Builder = make_builder(program, request.masks, request.example)
        self.form: Form | None = form_at_hand(request.net, request.masks)
        self.kinks = len(self.builder.ids)
        self.images = request.images
        self.forward = sum(program.multiply_adds.values())
        self.costs = _impulse_costs.setdefault(request.net, {})
        self.trials = (1 + request.hypotheses) * self.images * self.builder.pairs()
        self.itemsize = request.example.element_size()

    def could_be_below(self, cost: float) -> bool:
        """Before anything is counted that takes time to count."""
        return GEMM_WEIGHT * self.trials < cost

    def impulse_cost(self, source: int) -> int:
        units = self.builder.image if source == IMAGE else self.builder.units[source]
        key = (source, units.tile if units.spatial else 0)
        if key not in self.costs and units.count:
            self.costs[key] = self.builder.impulse_cost(source)
        return self.costs.get(key, 0)

    @cached_property
    def image_build(self) -> int:
        return self.builder.image.count * self.impulse_cost(IMAGE)

    @cached_property
    def with_image(self) -> bool:
        """Are U and W worth their impulses, or is running the affine net on each image less?"""
        if self.form is not None:
            return self.form.image is not None
        one_by_one = self.images * self.forward
        matrices = self.images * self.builder.image_numbers()
        return matrices < one_by_one and self.image_build * BUILD_WEIGHT + matrices < one_by_one

    @cached_property
    def build(self) -> int:
        if self.form is not None:
            return 0
        of_sites = sum(
            u.count * self.impulse_cost(r) for r, u in enumerate(self.builder.units)
        )  # fmt: skip
        return of_sites + (self.image_build if self.with_image else 0)

    @cached_property
    def affine(self) -> int:
        known = 0 if self.form is None else self.form.known.images
        each = self.builder.image_numbers() if self.with_image else self.forward
        return max(0, self.images - known) * each

    @property
    def bytes(self) -> int:
        """Of the form."""
        image = self.builder.image_numbers() if self.with_image else 0
        return (self.builder.pairs() + image) * self.itemsize

    def weighted(self) -> float:
        """To be compared with stacked's multiply-adds."""
        gemm = self.trials + (self.affine if self.with_image else 0)
        forward = 0 if self.with_image else self.affine
        return BUILD_WEIGHT * self.build + GEMM_WEIGHT * gemm + forward
