"""Building a collapsed form: unit impulses through the affine net.

The impulses of a site start at that site and run in batches of neighbours; positions that they
have not reached yet are neither stored nor convolved (patches.py). Ranks share out the batches.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from fastbcd.masking.masks import MaskSet
from fastbcd.runtime.ranks import all_sum, rank, world
from fastbcd.scoring.collapsed.affine_net import IMAGE, AffineNet
from fastbcd.scoring.collapsed.form import Block, Form
from fastbcd.scoring.collapsed.patches import LARGE, ImpulseBatch, Positions, stored, whole
from fastbcd.scoring.stacked import peak_bytes

PIECE = 32  # images at a time through the affine net
KERNELS = 2**25  # bytes: oneDNN compiles a kernel for each shape of patch, and keeps it


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

    # ------------------------------------------------------------------------------- sizes

    def pairs(self) -> int:
        """How many numbers H and G have."""
        return sum(self.numbers) + len(self.ids) * self.classes

    def image_numbers(self) -> int:
        """How many numbers U and W have."""
        return self.positions[IMAGE].count * (len(self.ids) + self.classes)

    def build_bytes(self) -> int:
        """What `build` takes beside the form: a batch of impulses, one site's rows, kernels."""
        largest = max(self.numbers, default=0) * self.like.element_size()
        kernels = KERNELS if self.like.device.type == "cpu" else 0
        return LARGE * peak_bytes(self.net.program) + largest + kernels

    def impulse_cost(self, source: int) -> int:
        """Predicted multiply-adds of one impulse at a source, from one in the middle."""
        positions = self.positions[source]
        if not positions.count:
            return 0
        middle = positions.batches[len(positions.batches) // 2]
        with FakeTensorMode(allow_non_fake_inputs=True):
            impulse = positions.impulses(middle._replace(stop=middle.start + 1), self.like)
            pushed = self.net.push(source, impulse, self.steps[source])
            cost = self.net.cost
            return sum(cost[node] * stored(value).numel() for node, value in pushed if node in cost)

    # ------------------------------------------------------------------------------- build

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
