"""Building a collapsed form: unit impulses through the affine net.

The impulses of a site start at that site and run in batches of neighbours; positions that they
have not reached yet are neither stored nor convolved (patches.py). Ranks share out the batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from fastbcd.masking.masks import MaskSet
from fastbcd.runtime.ranks import all_sum, rank, world
from fastbcd.scoring.collapsed.affine_net import IMAGE, AffineNet
from fastbcd.scoring.collapsed.form import Block, Form
from fastbcd.scoring.collapsed.patches import stored, whole
from fastbcd.scoring.collapsed.tiles import LARGE, ImpulseBatch, Positions
from fastbcd.scoring.stacked import peak_bytes

PIECE = 32  # images at a time through the affine net
KERNELS = 2**25  # bytes: oneDNN compiles a kernel for each shape of patch, and keeps it


class FormBuilder:
    """What is known before any impulse runs: the kept positions, and which sites affect which."""

    def __init__(self, net: AffineNet, masks: MaskSet, like: Tensor) -> None:
        """like: a tensor of the dtype and on the device of the values."""
        self.net, self.like = net, like
        program = net.program
        kept = [bits.flatten().nonzero().flatten() for bits in masks.split()]
        self.positions = {
            s: Positions(site.shape, where)
            for s, (site, where) in enumerate(zip(masks.sites, kept, strict=True))
        }
        shape = program.shapes[program.placeholder][1:]
        self.positions[IMAGE] = Positions(shape, torch.arange(like[0].numel()))
        self.classes = program.shapes[program.output][-1]
        self.site_of = {s.node: s.site for s in program.activations}
        self.ids = torch.cat(
            [site.start + where[self.positions[s].order]
             for s, (site, where) in enumerate(zip(masks.sites, kept, strict=True))]
        )  # fmt: skip
        self.counts = [len(where) for where in kept]
        self.bounds = [sum(self.counts[:s]) for s in range(len(kept) + 1)]
        self.steps = {source: net.reached(source) for source in self.positions}
        # sources[s]: the sites whose kinks act on site s
        reached = {r: {step.node for step in steps} for r, steps in self.steps.items()}
        self.sources = [
            [r for r, n in enumerate(self.counts) if n and net.starts[s] in reached[r]]
            if self.counts[s] else [] for s in range(len(kept))
        ]  # fmt: skip

    # ------------------------------------------------------------------------------- sizes

    def pairs(self) -> int:
        """How many numbers H and G have."""
        return sum(map(self._site_numbers, range(len(self.counts)))) + len(self.ids) * self.classes

    def _site_numbers(self, s: int) -> int:
        return self.counts[s] * sum(self.counts[r] for r in self.sources[s])

    def image_numbers(self) -> int:
        """How many numbers U and W have."""
        return self.positions[IMAGE].count * (len(self.ids) + self.classes)

    def build_bytes(self) -> int:
        """What `build` takes beside the form: a batch of impulses, one site's rows, kernels."""
        largest = max(map(self._site_numbers, range(len(self.counts))), default=0)
        kernels = KERNELS if self.like.device.type == "cpu" else 0
        return LARGE * peak_bytes(self.net.program) + largest * self.like.element_size() + kernels

    def impulse_cost(self, source: int) -> int:
        """Predicted multiply-adds of one impulse at a source, from one in the middle."""
        positions = self.positions[source]
        if not positions.count:
            return 0
        batches = list(positions.batches())
        middle = batches[len(batches) // 2]
        one = ImpulseBatch(middle.start, middle.start + 1, middle.box)
        with FakeTensorMode(allow_non_fake_inputs=True):
            impulse = positions.impulses(one, self.like)
            return sum(
                self.net.cost[node] * stored(value).numel()
                for node, value in self.net.push(source, impulse, self.steps[source])
                if node in self.net.cost
            )

    # ------------------------------------------------------------------------------- build

    def build(self, with_image: bool) -> Form:
        """Push all impulses; U and W too if `with_image`."""
        counts, new = self.counts, self.like.new_zeros
        rows = [{r: sum(counts[q] for q in sources if q < r) for r in sources}
                for sources in self.sources]  # fmt: skip
        between = [new(sum(counts[r] for r in sources), n)
                   for sources, n in zip(self.sources, counts, strict=True)]  # fmt: skip
        out = new(len(self.ids), self.classes)
        pixels = self.positions[IMAGE].place
        image = new(len(pixels), len(self.ids)) if with_image else None
        image_out = new(len(pixels), self.classes) if with_image else None
        for source, batch in self.batches(with_image):
            impulses = self.positions[source].impulses(batch, self.like)
            span = torch.arange(batch.start, batch.stop)
            if source == IMAGE:  # in the order of the images' memory, channels last
                span = pixels[span]
            for node, value in self.net.push(source, impulses, self.steps[source]):
                if node is self.net.program.output:
                    target = image_out if source == IMAGE else out[self.bounds[source] :]
                    assert target is not None
                    target[span.to(target.device)] = whole(value)
                s = self.site_of.get(node)
                if s is None or not counts[s]:
                    continue
                if source == IMAGE:
                    assert image is not None
                    target = image[:, self.bounds[s] : self.bounds[s + 1]]
                else:
                    target = between[s][rows[s][source] :]
                which, found = self.positions[s].gather(value)
                place = span.to(target.device)
                if which is None:
                    target[place] = found
                else:
                    target[place[:, None], which.to(target.device)] = found
        blocks = []
        for s in range(len(counts)):  # one at a time: the rows may be copied
            blocks.append(self.nonzero(all_sum(between[s]), s))
            between[s] = out
        constant, constant_out = self.affine_part(torch.zeros_like(self.like[:1]))
        if image is not None and image_out is not None:
            image, image_out = all_sum(image), all_sum(image_out)
        return Form(
            self.ids, self.bounds, blocks, all_sum(out), constant[0], constant_out[0], image,
            image_out,
        )  # fmt: skip

    def batches(self, with_image: bool) -> Iterator[tuple[int, ImpulseBatch]]:
        """(source, batch) of this rank; a progress bar is shown if it takes some seconds."""
        every = [
            (source, batch)
            for source, positions in self.positions.items()
            if with_image or source != IMAGE
            for batch in positions.batches()
        ]
        mine = every[rank() :: world()]
        total = sum(b.stop - b.start for _, b in mine)
        hidden = True if rank() else None  # None: shown on a terminal
        with tqdm(total=total, desc="collapsing", unit=" impulses", delay=2.0, leave=False,
                  disable=hidden) as bar:  # fmt: skip
            for source, batch in mine:
                yield source, batch
                bar.update(batch.stop - batch.start)

    def nonzero(self, matrix: Tensor, s: int) -> list[Block]:
        """H's rows for site s as blocks of consecutive kinks, without sites that add nothing."""
        found: list[Block] = []
        row = 0
        for r in self.sources[s]:
            stop = row + self.counts[r]
            if matrix[row:stop].count_nonzero():
                start = self.bounds[r]
                if found and found[-1].stop == start:
                    start = found.pop().start
                height = self.bounds[r + 1] - start
                found.append(Block(start, self.bounds[r + 1], matrix[stop - height : stop]))
            row = stop
        whole_matrix = sum(b.stop - b.start for b in found) == len(matrix)
        return found if whole_matrix else [b._replace(matrix=b.matrix.clone()) for b in found]

    def affine_part(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, ...] through the affine net: z at the kept ReLUs [B, R], logits."""
        z = x.new_empty(len(x), len(self.ids))
        logits = x
        for node, value in self.net.run(x):
            s = self.site_of.get(node)
            if s is not None and self.counts[s]:
                z[:, self.bounds[s] : self.bounds[s + 1]] = self.positions[s].gather(value)[1]
            if node is self.net.program.output:
                logits = value
        return z, logits
