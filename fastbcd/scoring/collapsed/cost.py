"""What scoring with the collapsed engine costs, with and without building the form.

A multiply-add does not take the same time everywhere: the weights say how much longer it takes
than one of stacked's convolutions, as measured (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import weakref
from functools import cached_property

from torch import nn

from fastbcd.scoring.collapsed.affine_net import IMAGE
from fastbcd.scoring.collapsed.build import FormBuilder
from fastbcd.scoring.collapsed.form import Form
from fastbcd.scoring.engine import Request

BUILD_WEIGHT = 1.3  # impulses: small images, many shapes; a GEMM of hypotheses: 1
# By net: multiply-adds of an impulse, which hardly depend on the masks.
_impulse_costs: weakref.WeakKeyDictionary[nn.Module, dict] = weakref.WeakKeyDictionary()


class CollapsedCost:
    """Multiply-adds and bytes for one request, given the form if there is one already."""

    def __init__(self, request: Request, builder: FormBuilder, form: Form | None) -> None:
        self.builder, self.form, self.images = builder, form, request.images
        self.kinks = len(builder.ids)
        self.forward = sum(builder.net.program.multiply_adds.values())
        self.impulse_costs = _impulse_costs.setdefault(request.net, {})
        self.trials = (1 + request.hypotheses) * self.images * builder.pairs()
        self.itemsize = request.example.element_size()

    def of_impulses(self, source: int) -> int:
        """All impulses of a source."""
        positions = self.builder.positions[source]
        key = (source, positions.tile)
        if key not in self.impulse_costs and positions.count:
            self.impulse_costs[key] = self.builder.impulse_cost(source)
        return positions.count and positions.count * self.impulse_costs[key]

    @cached_property
    def with_image(self) -> bool:
        """Are U and W worth their impulses, or is running the affine net on each image less?"""
        if self.form is not None:
            return self.form.image is not None
        gain = self.images * (self.forward - self.builder.image_numbers())
        return gain > 0 and self.of_impulses(IMAGE) * BUILD_WEIGHT < gain

    @cached_property
    def build(self) -> int:
        sources = set(self.builder.positions) - (set() if self.with_image else {IMAGE})
        return sum(map(self.of_impulses, sources)) if self.form is None else 0

    @cached_property
    def affine(self) -> int:
        known = 0 if self.form is None else self.form.affine.images
        each = self.builder.image_numbers() if self.with_image else self.forward
        return max(0, self.images - known) * each

    @property
    def form_bytes(self) -> int:
        image = self.builder.image_numbers() if self.with_image else 0
        return (self.builder.pairs() + image) * self.itemsize

    @property
    def peak_bytes(self) -> int:
        """Of the form and, if it is not there yet, of building it."""
        return self.form_bytes + (self.builder.build_bytes() if self.form is None else 0)

    def weighted(self) -> float:
        """Comparable with stacked's multiply-adds."""
        return BUILD_WEIGHT * self.build + self.trials + self.affine
