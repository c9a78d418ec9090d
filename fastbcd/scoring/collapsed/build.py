"""Building a collapsed form by unit impulses through the affine net, and what a form costs.

The impulses of a site start at that site and run in batches of neighbours; positions that they
have not reached yet are neither stored nor convolved (patches.py). Ranks share out the batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

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
from fastbcd.scoring.engine import Request
from fastbcd.scoring.program import Program
from fastbcd.scoring.stacked import peak_bytes

MOST = 1024  # impulses in a batch on a GPU, if an eighth of the memory holds them
# Bytes: oneDNN compiles a kernel for each shape of patch, and keeps it (AVX-512: 90 MiB).
KERNELS = 92 * 2**20


class FormBuilder:
    """What is known before any impulse runs: the kept positions, and what they reach."""

    def __init__(self, program: Program, request: Request) -> None:
        net = AffineNet(program)
        device = request.example.device
        large = LARGE  # impulses in a batch
        if device.type != "cpu":
            held = request.memory // 8 // max(peak_bytes(program), 1)
            large = max(LARGE, min(MOST, held))
        self.net = net
        self.like = request.example
        self.large = large
        bits = request.masks.split()
        self.sites = [Positions(part, device, large) for part in bits]
        # No emptied sites.
        self.sources = {source: self.sites[source] for source in net.site_of.values()}
        pixels = torch.ones(program.shapes[program.placeholder][1:], dtype=torch.bool)
        self.sources[IMAGE] = Positions(pixels, device, large)
        self.steps = {source: net.reached(source) for source in self.sources}
        for source, steps in self.steps.items():
            if any(net.site_of.get(step.node, source) < source for step in steps):
                raise NotAffine(
                    "its masked activations are not numbered in the order of execution"
                )
        counts = [places.count for places in self.sites]
        self.bounds = [0, *accumulate([*counts, math.prod(net.output_shape)])]
        sites = zip(request.masks.sites, self.sites, strict=True)
        self.ids = torch.cat([site.start + places.flat for site, places in sites])
        between = pairwise(self.bounds)
        self.pairs = sum(low * (high - low) for low, high in between)  # of H
        self.image_numbers = pixels.numel() * self.bounds[-1]  # of U

    @property
    def batch_bytes(self) -> int:
        """Of a batch of impulses and the kernels for its patches."""
        values = self.large * peak_bytes(self.net.program)
        if self.like.device.type == "cpu":
            values += KERNELS
        return values

    def cost_of_one(self, source: int) -> int:
        """Multiply-adds of an impulse in the middle of a source."""
        positions = self.sources[source]
        middle = positions.batches[len(positions.batches) // 2]
        with FakeTensorMode(allow_non_fake_inputs=True):
            one = middle._replace(stop=middle.start + 1)
            impulse = positions.impulses(one, self.like)
            return self.net.multiply_adds(source, impulse, self.steps[source])

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
                target = self.target(node)
                if target is None:
                    continue
                numbers = self.numbers(target, value)
                if image is not None and source == IMAGE:
                    rows = pixels[batch.start : batch.stop]  # in x's memory
                    image[rows, bounds[target] : bounds[target + 1]] = numbers
                else:
                    first = bounds[source] + batch.start
                    responses[target][:, first : first + len(numbers)] = numbers.T
        responses = [all_sum(matrix) for matrix in responses]
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

    def target(self, node: fx.Node) -> int | None:
        """The number of a site with kinks, or that of the logits; None of another value."""
        if node is self.net.program.output:
            return len(self.sites)
        site = self.net.site_of.get(node)
        if site is None or not self.sites[site].count:
            return None
        return site

    def numbers(self, target: int, value: Value) -> Tensor:
        """A value at the kinks of a site, or logits, [n, ...]."""
        if target == len(self.sites):
            return whole(value).flatten(1)
        return self.sites[target].gather(value)

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
            if with_image or source != IMAGE
            for batch in positions.batches
        ]
        mine = every[rank() :: world()]
        options: dict[str, Any] = {"unit": " batches", "delay": 2.0, "leave": False}
        return bar(True, mine, desc="collapsing", **options)
