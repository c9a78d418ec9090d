"""Building a collapsed form by unit impulses through the affine net, and what a form costs.

The impulses of a site start at that site and run in batches of neighbours; positions that they
have not reached yet are neither stored nor convolved (patches.py). Ranks share out the batches.
A multiply-add of the build takes longer than one of stacked's convolutions, as measured
(benchmarks/RESULTS.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from fastbcd.masking.masks import MaskSet
from fastbcd.runtime.ranks import all_sum, rank, world
from fastbcd.scoring.collapsed.affine_net import IMAGE, AffineNet
from fastbcd.scoring.collapsed.form import Block, Form
from fastbcd.scoring.collapsed.patches import LARGE, ImpulseBatch, Positions, stored, whole
from fastbcd.scoring.engine import Request
from fastbcd.scoring.stacked import peak_bytes

PIECE = 32  # images at a time through the affine net
KERNELS = 2**25  # bytes: oneDNN compiles a kernel for each shape of patch, and keeps it
BUILD_WEIGHT = 1.3  # of a multiply-add of impulses: small images, many shapes
# By net: multiply-adds of an impulse, which hardly depend on the masks.
_impulse_costs: weakref.WeakKeyDictionary[nn.Module, dict] = weakref.WeakKeyDictionary()


class FormBuilder:
    """What is known before any impulse runs: the kept positions, and which sites affect which."""

    def __init__(self, net: AffineNet, masks: MaskSet, like: Tensor) -> None:
        """like: a tensor of the dtype and on the device of the values."""
        self.net, self.like, shapes = net, like, net.program.shapes
        kept = [bits.flatten().nonzero().flatten() for bits in masks.split()]
        flat = {**dict(enumerate(kept)), IMAGE: torch.arange(like[0].numel())}
        self.positions = {
            source: Positions(shapes[net.starts[source]][1:], where, like.device)
            for source, where in flat.items()
        }
        self.classes = shapes[net.program.output][-1]
        self.site_of = {s.node: s.site for s in net.program.activations}
        self.ids = torch.cat([site.start + kept[s][self.positions[s].order]
                              for s, site in enumerate(masks.sites)])  # fmt: skip
        self.counts = [len(where) for where in kept]
        self.bounds = [sum(self.counts[:s]) for s in range(len(kept) + 1)]
        self.steps = {source: net.reached(source) for source in self.positions}
        # rows[s]: the sites whose kinks act on site s, and the first row of each in H's part for s
        reached = {r: {step.node for step in steps} for r, steps in self.steps.items()}
        self.rows: list[dict[int, int]] = []
        self.heights: list[int] = []
        for s, n in enumerate(self.counts):
            rows, height = {}, 0
            for r, m in enumerate(self.counts):
                if n and m and net.starts[s] in reached[r]:
                    rows[r] = height
                    height += m
            self.rows.append(rows)
            self.heights.append(height)
        self.numbers = [h * n for h, n in zip(self.heights, self.counts, strict=True)]  # of H

    def build(self, with_image: bool) -> Form:
        """Push all impulses; U and W too if `with_image`."""
        new, bounds, pixels = self.like.new_zeros, self.bounds, self.positions[IMAGE].place
        between = [new(h, n) for h, n in zip(self.heights, self.counts, strict=True)]
        out = new(len(self.ids), self.classes)
        image = new(len(pixels) if with_image else 0, len(self.ids))
        image_out = new(len(image), self.classes)
        for source, batch in self.batches(with_image):
            impulses = self.positions[source].impulses(batch, self.like)
            # Rows of U are in the order of the images' memory, channels last.
            of_image, rows = source == IMAGE, slice(batch.start, batch.stop)
            for node, value in self.net.push(source, impulses, self.steps[source]):
                if node is self.net.program.output:
                    target = image_out if of_image else out[bounds[source] :]
                    target[pixels[rows] if of_image else rows] = whole(value)
                s = self.site_of.get(node)
                if s is not None and self.counts[s]:
                    columns, found = self.positions[s].gather(value)
                    if of_image:
                        image[:, bounds[s] : bounds[s + 1]][pixels[rows], columns] = found
                    else:
                        between[s][self.rows[s][source] :][rows, columns] = found
        blocks = []
        for s in range(len(between)):  # one at a time: the rows may be copied
            blocks.append(self.nonzero(all_sum(between[s]), s))
            between[s] = out
        constant, constant_out = self.affine_part(torch.zeros_like(self.like[:1]))
        of_images = (all_sum(image), all_sum(image_out)) if with_image else (None, None)
        return Form(
            self.ids, bounds, blocks, all_sum(out), constant[0], constant_out[0], *of_images
        )

    def batches(self, with_image: bool) -> Iterable[tuple[int, ImpulseBatch]]:
        """(source, batch) of this rank; a progress bar is shown if it takes some seconds."""
        every = [(source, batch) for source, positions in self.positions.items()
                 if with_image or source != IMAGE for batch in positions.batches]  # fmt: skip
        hidden = True if rank() else None  # None: shown on a terminal
        return tqdm(every[rank() :: world()], desc="collapsing", unit=" batches", delay=2.0,
                    leave=False, disable=hidden)  # fmt: skip

    def nonzero(self, matrix: Tensor, s: int) -> list[Block]:
        """H's rows for site s as blocks of consecutive kinks, without sites that add nothing."""
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

    def affine_part(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, ...] through the affine net: z at the kept ReLUs [B, R], logits."""
        z, logits = x.new_empty(len(x), len(self.ids)), x
        for node, value in self.net.run(x):
            s = self.site_of.get(node)
            if s is not None and self.counts[s]:
                z[:, self.bounds[s] : self.bounds[s + 1]] = self.positions[s].gather(value)[1]
            logits = value  # the last one
        return z, logits


class CollapsedCost:
    """Multiply-adds and bytes for one request, given the form if there is one already."""

    def __init__(self, request: Request, builder: FormBuilder, form: Form | None) -> None:
        self.builder, self.form, self.images = builder, form, request.images
        self.forward = sum(builder.net.program.multiply_adds.values())
        self.known_costs = _impulse_costs.setdefault(request.net, {})
        self.kinks, self.itemsize = len(builder.ids), request.example.element_size()
        # Numbers of H and G, and of U and W.
        self.pairs = sum(builder.numbers) + self.kinks * builder.classes
        self.image_numbers = builder.positions[IMAGE].count * (self.kinks + builder.classes)
        self.trials = (1 + request.hypotheses) * self.images * self.pairs

    def of_impulses(self, source: int) -> int:
        """All impulses of a source, predicted from one in the middle."""
        positions, net = self.builder.positions[source], self.builder.net
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
        """Are U and W worth their impulses, or is running the affine net on each image less?"""
        if self.form is not None:
            return self.form.image is not None
        gain = self.images * (self.forward - self.image_numbers)
        return gain > 0 and self.of_impulses(IMAGE) * BUILD_WEIGHT < gain

    @cached_property
    def build(self) -> int:
        sources = set(self.builder.positions) - (set() if self.with_image else {IMAGE})
        return sum(map(self.of_impulses, sources)) if self.form is None else 0

    @cached_property
    def affine(self) -> int:
        known = 0 if self.form is None else self.form.affine.images
        each = self.image_numbers if self.with_image else self.forward
        return max(0, self.images - known) * each

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
        return self.form_bytes + LARGE * peak_bytes(self.builder.net.program) + rows + kernels

    def weighted(self) -> float:
        """Comparable with stacked's multiply-adds."""
        return BUILD_WEIGHT * self.build + self.trials + self.affine
