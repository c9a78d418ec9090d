"""Building a collapsed form by unit impulses through the affine net, and what a form costs.

The impulses of a site start at that site and run in batches of neighbours; positions that they
have not reached yet are neither stored nor convolved (patches.py). Ranks share out the batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fastbcd.masking.masks import MaskSet
from fastbcd.runtime.ranks import all_sum, rank, world
from fastbcd.runtime.show import bar
from fastbcd.scoring.collapsed.affine_net import IMAGE, AffineNet
from fastbcd.scoring.collapsed.form import Form
from fastbcd.scoring.collapsed.linear import NotAffine
from fastbcd.scoring.collapsed.patches import (
    LARGE,
    ImpulseBatch,
    Positions,
    Value,
    whole,
)
from fastbcd.scoring.compiled import compiled
from fastbcd.scoring.engine import Request
from fastbcd.scoring.stacked import peak_bytes

MOST = 1024  # impulses in a batch on a GPU, if an eighth of the memory holds them
KERNELS = (
    44 * 2**20
)  # bytes: oneDNN compiles a kernel for each shape of patch, and keeps it
BUILD_WEIGHT = (
    1.3  # time of a multiply-add of impulses, as measured (benchmarks/RESULTS.md)
)


class FormBuilder:
    """What is known before any impulse runs: the kept positions, and what they reach."""

    def __init__(
        self, net: AffineNet, masks: MaskSet, like: Tensor, memory: int = 0
    ) -> None:
        """like: a tensor of the dtype and on the device of the values; memory: bytes."""
        self.net = net
        self.like = like
        self.large = LARGE  # impulses in a batch
        if like.device.type != "cpu":
            held = memory // 8 // max(peak_bytes(net.program), 1)
            self.large = max(LARGE, min(MOST, held))
        self.sites = [
            Positions(bits, like.device, self.large) for bits in masks.split()
        ]
        image = torch.ones(
            net.program.shapes[net.program.placeholder][1:], dtype=torch.bool
        )
        # No emptied sites.
        self.sources = {
            source: self.sites[source] for source in net.starts if source != IMAGE
        }
        self.sources[IMAGE] = Positions(image, like.device, self.large)
        self.steps = {source: net.reached(source) for source in self.sources}
        for source, steps in self.steps.items():
            if any(net.site_of.get(step.node, source) < source for step in steps):
                raise NotAffine(
                    "its masked activations are not numbered in the order of execution"
                )
        counts = [places.count for places in self.sites]
        self.bounds = [0, *accumulate([*counts, math.prod(net.output_shape)])]
        starts = [site.start for site in masks.sites]
        flat = [
            start + places.flat
            for start, places in zip(starts, self.sites, strict=True)
        ]
        self.ids = torch.cat(flat)
        self.pairs = sum(
            low * (high - low) for low, high in pairwise(self.bounds)
        )  # of H
        self.image_numbers = image.numel() * self.bounds[-1]  # of U

    def build(self, with_image: bool) -> Form:
        """Push all impulses; U too if `with_image`."""
        bounds = self.bounds
        responses = [
            self.like.new_zeros(high - low, low) for low, high in pairwise(bounds)
        ]
        pixels = self.sources[IMAGE].place
        image = None
        if with_image:
            image = self.like.new_zeros(len(pixels), bounds[-1])
        for source, batch in self.batches(with_image):
            impulses = self.sources[source].impulses(batch, self.like)
            for node, value in self.net.push(source, impulses, self.steps[source]):
                for target, columns, numbers in self.read(node, value):
                    if (
                        image is not None and source == IMAGE
                    ):  # in the order of x's memory
                        rows = pixels[batch.start : batch.stop]
                        image[:, bounds[target] : bounds[target + 1]][rows, columns] = (
                            numbers
                        )
                    else:
                        first = bounds[source] + batch.start
                        responses[target][columns, first : first + len(numbers)] = (
                            numbers.T
                        )
        for target, matrix in enumerate(responses):
            responses[target] = all_sum(matrix)
        if image is not None:
            image = all_sum(image)
        places = torch.cat([site.place for site in self.sites])
        nothing = torch.zeros_like(self.like[:1])
        return Form(
            self.ids,
            places,
            bounds,
            responses,
            constant=self.net.values_at(places, bounds, nothing)[:, 0],
            image=image,
            lines=self.lines(),
        )

    def read(self, node: fx.Node, value: Value) -> Iterator[tuple[int, slice, Tensor]]:
        """(target, columns, numbers [n, ...]) of a value at a site with kinks, or of logits."""
        if node is self.net.program.output:
            yield len(self.sites), slice(None), whole(value).flatten(1)
        elif node in self.net.site_of:
            site = self.net.site_of[node]
            if self.sites[site].count:
                yield site, *self.sites[site].gather(value)

    def lines(self) -> Tensor | None:
        """c0 and 1 - c1 of each kink, [2, R]; None if all sites are the identity."""
        if not self.net.lines:
            return None
        lines = self.like.new_zeros(2, self.bounds[-2])
        for node, (c0, c1) in self.net.lines.items():
            site = self.net.site_of[node]
            positions = self.sites[site]
            channel = positions.flat.to(c0.device) // math.prod(positions.shape[1:])
            of_site = slice(self.bounds[site], self.bounds[site + 1])
            lines[:, of_site] = torch.stack([c0, 1 - c1])[:, channel]
        return lines

    def batches(self, with_image: bool) -> Iterable[tuple[int, ImpulseBatch]]:
        """(source, batch) of this rank; a progress bar is shown if it takes some seconds."""
        every = [
            (source, batch)
            for source, positions in self.sources.items()
            for batch in positions.batches
            if with_image or source != IMAGE
        ]
        mine = every[rank() :: world()]
        return bar(
            True, mine, desc="collapsing", unit=" batches", delay=2.0, leave=False
        )


class CollapsedCost:
    """Multiply-adds and bytes for one request, given the form if there is one already."""

    def __init__(
        self, request: Request, builder: FormBuilder, form: Form | None
    ) -> None:
        self.builder = builder
        self.form = form
        self.images = request.images
        self.forward = sum(builder.net.program.multiply_adds.values())
        self.made = compiled(request.net)
        self.kinks = len(builder.ids)
        self.itemsize = request.example.element_size()
        self.trials = (1 + request.hypotheses) * request.images * builder.pairs

    def of_impulses(self, source: int) -> int:
        """All impulses of a source, predicted from one in the middle."""
        positions = self.builder.sources[source]
        if not positions.count:
            return 0
        known = self.made.impulse_costs  # which hardly depend on the masks
        key = (source, positions.tile)
        if key not in known:
            middle = positions.batches[len(positions.batches) // 2]
            with FakeTensorMode(allow_non_fake_inputs=True):
                one = middle._replace(stop=middle.start + 1)
                impulse = positions.impulses(one, self.builder.like)
                steps = self.builder.steps[source]
                known[key] = self.builder.net.multiply_adds(source, impulse, steps)
        return positions.count * known[key]

    @cached_property
    def with_image(self) -> bool:
        """Is U worth its impulses, or is running the affine net on each image less?"""
        if self.form is not None:
            return self.form.image is not None
        gain = self.images * (self.forward - self.builder.image_numbers)
        return gain > 0 and self.of_impulses(IMAGE) * BUILD_WEIGHT < gain

    @cached_property
    def build(self) -> int:
        """Multiply-adds of the impulses."""
        if self.form is not None:
            return 0
        sources = [
            source
            for source in self.builder.sources
            if self.with_image or source != IMAGE
        ]
        return sum(self.of_impulses(source) for source in sources)

    @cached_property
    def affine(self) -> int:
        """Multiply-adds of U x."""
        unknown = max(0, self.images - len(self.made.images.known))
        if self.with_image:
            return unknown * self.builder.image_numbers
        return unknown * self.forward

    @property
    def form_bytes(self) -> int:
        """Of H and U."""
        numbers = self.builder.pairs
        if self.with_image:
            numbers += self.builder.image_numbers
        return numbers * self.itemsize

    @property
    def peak_bytes(self) -> int:
        """Of the form and, while it is built, a batch of impulses and the kernels for patches."""
        if self.form is not None:
            return self.form_bytes
        batch = self.builder.large * peak_bytes(self.builder.net.program)
        if self.builder.like.device.type == "cpu":
            batch += KERNELS
        return self.form_bytes + batch

    def weighted(self) -> float:
        """Comparable with stacked's multiply-adds."""
        return BUILD_WEIGHT * self.build + self.trials + self.affine
