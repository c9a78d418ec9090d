"""Building a collapsed form by unit impulses through the affine net, and what a form costs.

The impulses of a site start at that site and run in batches of neighbours; positions that they
have not reached yet are neither stored nor convolved (patches.py). Ranks share out the batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from fastbcd.masking.masks import MaskSet
from fastbcd.runtime.ranks import all_sum, rank, world
from fastbcd.scoring.collapsed.affine_net import IMAGE, AffineNet
from fastbcd.scoring.collapsed.form import Block, Form
from fastbcd.scoring.collapsed.patches import LARGE, ImpulseBatch, Positions, stored
from fastbcd.scoring.compiled import compiled
from fastbcd.scoring.engine import Request
from fastbcd.scoring.stacked import peak_bytes

MOST = 1024  # impulses in a batch on a GPU, if an eighth of the memory holds them
KERNELS = 2**25  # bytes: oneDNN compiles a kernel for each shape of patch, and keeps it
BUILD_WEIGHT = 1.3  # time of a multiply-add of impulses, as measured (benchmarks/RESULTS.md)


class FormBuilder:
    """What is known before any impulse runs: the kept positions, and which sites affect which."""

    def __init__(self, net: AffineNet, masks: MaskSet, like: Tensor, memory: int = 0) -> None:
        """like: a tensor of the dtype and on the device of the values; memory: bytes."""
        self.net, self.like, self.large = net, like, LARGE
        if like.device.type != "cpu":
            self.large = max(LARGE, min(MOST, memory // 8 // max(peak_bytes(net.program), 1)))
        image, logits = (torch.ones(net.program.shapes[node][1:], dtype=torch.bool)
                         for node in (net.program.placeholder, net.program.output))  # fmt: skip
        # Where values are read: at the sites and, as the last of these targets, the logits.
        self.positions = [Positions(bits, like.device, self.large)
                          for bits in (*masks.split(), logits)]  # fmt: skip
        sites = self.positions[:-1]
        self.target = {node: s for s, node in net.starts.items() if s != IMAGE}
        self.target[net.program.output] = len(sites)
        pairs = zip(masks.sites, sites, strict=True)
        self.ids = torch.cat([site.start + places.flat for site, places in pairs])
        pixels = Positions(image, like.device, self.large)
        self.sources = {s: pixels if s == IMAGE else sites[s] for s in net.starts}  # no emptied
        self.steps = {source: net.reached(source) for source in self.sources}
        self.counts = [places.count for places in self.positions]
        self.bounds = [sum(self.counts[:s]) for s in range(len(sites) + 2)]
        # rows[s]: the sites whose kinks act on target s, and the first row of each in H_s
        reached = {r: {step.node for step in steps} for r, steps in self.steps.items()}
        self.rows: list[dict[int, int]] = [{} for _ in self.positions]
        self.heights = [0] * len(self.positions)
        for node, s in self.target.items():
            for r, m in enumerate(self.counts[:-1]):
                if self.counts[s] and m and node in reached[r]:
                    self.rows[s][r] = self.heights[s]
                    self.heights[s] += m
        self.numbers = [h * n for h, n in zip(self.heights, self.counts, strict=True)]  # of H

    def build(self, with_image: bool) -> Form:
        """Push all impulses; U too if `with_image`."""
        new, bounds, pixels = self.like.new_zeros, self.bounds, self.sources[IMAGE].place
        between = [new(h, n) for h, n in zip(self.heights, self.counts, strict=True)]
        image = new(len(pixels) if with_image else 0, bounds[-1])
        for source, batch in self.batches(with_image):
            impulses = self.sources[source].impulses(batch, self.like)
            rows = slice(batch.start, batch.stop)
            for node, value in self.net.push(source, impulses, self.steps[source]):
                s = self.target.get(node)
                if s is not None and self.counts[s]:
                    columns, found = self.positions[s].gather(value)
                    if source == IMAGE:  # in the order of the images' memory, channels last
                        image[:, bounds[s] : bounds[s + 1]][pixels[rows], columns] = found
                    else:
                        between[s][self.rows[s][source] :][rows, columns] = found
        blocks = []
        for s in range(len(between)):  # one at a time: the rows may be copied
            blocks.append(self.nonzero(all_sum(between[s]), s))
            between[s] = new(0)
        constant = self.affine_part(torch.zeros_like(self.like[:1]))[:, 0]
        pixels_to = all_sum(image) if with_image else None
        return Form(self.ids, bounds, blocks, constant, pixels_to, self.lines())

    def lines(self) -> Tensor | None:
        """c0 and 1 - c1 of each kink, [2, R]; None if all sites are the identity."""
        if not self.net.lines:
            return None
        found = self.like.new_zeros(2, self.bounds[-2])
        for node, (c0, c1) in self.net.lines.items():
            s, (_, _, *space) = self.target[node], self.net.program.shapes[node]
            channel = self.positions[s].flat.to(c0.device) // math.prod(space)
            found[:, self.bounds[s] : self.bounds[s + 1]] = torch.stack([c0, 1 - c1])[:, channel]
        return found

    def batches(self, with_image: bool) -> Iterable[tuple[int, ImpulseBatch]]:
        """(source, batch) of this rank; a progress bar is shown if it takes some seconds."""
        every = [(source, batch) for source, places in self.sources.items()
                 if with_image or source != IMAGE for batch in places.batches]  # fmt: skip
        hidden = True if rank() else None  # None: shown on a terminal
        return tqdm(every[rank() :: world()], desc="collapsing", unit=" batches", delay=2.0,
                    leave=False, disable=hidden)  # fmt: skip

    def nonzero(self, matrix: Tensor, s: int) -> list[Block]:
        """H_s as blocks of consecutive kinks, without sites that add nothing."""
        parts = {r: matrix[row : row + self.counts[r]] for r, row in self.rows[s].items()}
        adds = torch.stack([part.any() for part in parts.values()]).tolist() if parts else []
        found: list[Block] = []
        for (r, row), some in zip(self.rows[s].items(), adds, strict=True):
            if some:
                start, stop = self.bounds[r], self.bounds[r + 1]
                if found and found[-1].stop == start:
                    start = found.pop().start
                end = row + self.counts[r]
                found.append(Block(start, stop, matrix[end - (stop - start) : end]))
        return found if all(adds) else [b._replace(matrix=b.matrix.clone()) for b in found]

    def affine_part(self, x: Tensor) -> Tensor:
        """Images [B, ...] through the affine net: z at the kept ReLUs, logits, [R + classes, B]."""
        z = x.new_empty(self.bounds[-1], len(x))
        for start in range(0, len(x), self.large // 2):
            some = slice(start, start + self.large // 2)
            for node, value, _ in self.net.run(x[some]):
                s = self.target[node]
                if self.counts[s]:
                    found = self.positions[s].gather(value)[1]
                    z[self.bounds[s] : self.bounds[s + 1], some] = found.T
        return z


class CollapsedCost:
    """Multiply-adds and bytes for one request, given the form if there is one already."""

    def __init__(self, request: Request, builder: FormBuilder, form: Form | None) -> None:
        self.builder, self.form, self.images = builder, form, request.images
        self.forward = sum(builder.net.program.multiply_adds.values())
        self.made = compiled(request.net)
        self.known_costs = self.made.impulse_costs  # which hardly depend on the masks
        self.kinks, self.itemsize = len(builder.ids), request.example.element_size()
        self.pairs = sum(builder.numbers)  # numbers of H
        self.image_numbers = builder.sources[IMAGE].count * builder.bounds[-1]  # of U
        self.trials = (1 + request.hypotheses) * self.images * self.pairs

    def of_impulses(self, source: int) -> int:
        """All impulses of a source, predicted from one in the middle."""
        positions, net = self.builder.sources[source], self.builder.net
        key = (source, positions.tile)
        if key not in self.known_costs and positions.count:
            middle = positions.batches[len(positions.batches) // 2]
            with FakeTensorMode(allow_non_fake_inputs=True):
                one = positions.impulses(middle._replace(stop=middle.start + 1), self.builder.like)
                self.known_costs[key] = sum(
                    net.cost[node] * stored(value).numel()
                    for node, value in net.push(source, one, self.builder.steps[source])
                    if node in net.cost
                )
        return positions.count and positions.count * self.known_costs[key]

    @cached_property
    def with_image(self) -> bool:
        """Is U worth its impulses, or is running the affine net on each image less?"""
        if self.form is not None:
            return self.form.image is not None
        gain = self.images * (self.forward - self.image_numbers)
        return gain > 0 and self.of_impulses(IMAGE) * BUILD_WEIGHT < gain

    @cached_property
    def build(self) -> int:
        sources = set(self.builder.sources) - (set() if self.with_image else {IMAGE})
        return sum(map(self.of_impulses, sources)) if self.form is None else 0

    @cached_property
    def affine(self) -> int:
        unknown = max(0, self.images - len(self.made.images.places))
        return unknown * (self.image_numbers if self.with_image else self.forward)

    @property
    def form_bytes(self) -> int:
        return (self.pairs + (self.image_numbers if self.with_image else 0)) * self.itemsize

    @property
    def peak_bytes(self) -> int:
        """Of the form and, while it is built, a batch of impulses, one site's rows, kernels."""
        if self.form is not None:
            return self.form_bytes
        rows = max(self.builder.numbers, default=0) * self.itemsize
        kernels = KERNELS if self.builder.like.device.type == "cpu" else 0
        batch = self.builder.large * peak_bytes(self.builder.net.program)
        return self.form_bytes + batch + rows + kernels

    def weighted(self) -> float:
        """Comparable with stacked's multiply-adds."""
        return BUILD_WEIGHT * self.build + self.trials + self.affine
