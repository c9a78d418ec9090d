"""Building a collapsed form: unit impulses through the affine net.

The impulses of a site start at that site and run in batches of neighbours; what they have not
reached yet is neither stored nor convolved (patches.py). Ranks share out the batches.
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
from fastbcd.scoring.collapsed.patches import whole
from fastbcd.scoring.collapsed.tiles import Group, Units
from fastbcd.scoring.program import Activation


class Builder:
    """What is known before any impulse runs: the units, and which sites see which."""

    def __init__(self, net: AffineNet, masks: MaskSet, like: Tensor) -> None:
        """like: a tensor of the dtype and on the device of the values."""
        self.net, self.like = net, like
        program = net.program
        self.units = [Units(s.shape, b.flatten().nonzero().flatten())
                      for s, b in zip(masks.sites, masks.split(), strict=True)]  # fmt: skip
        shape = program.shapes[program.placeholder][1:]
        self.image = Units(shape, torch.arange(like[0].numel()))
        self.classes = program.shapes[program.output][-1]
        self.site_of = {s.node: s.site for s in program.steps if isinstance(s, Activation)}
        kept = zip(masks.sites, masks.split(), self.units, strict=True)
        self.ids = torch.cat(
            [s.start + b.flatten().nonzero().flatten()[u.order] for s, b, u in kept]
        )
        counts = [u.count for u in self.units]
        self.bounds = [sum(counts[:s]) for s in range(len(counts) + 1)]
        self.steps = {r: net.reached(r) for r in [IMAGE, *range(len(counts))]}
        # sources[s]: the sites whose kinks act on site s
        seen = {r: {step.node for step in steps} for r, steps in self.steps.items()}
        nodes = {site: node for node, site in self.site_of.items()}
        self.sources = [
            [r for r in range(len(counts)) if counts[r] and nodes[s] in seen[r]]
            if counts[s] else [] for s in range(len(counts))
        ]  # fmt: skip

    def pairs(self) -> int:
        """How many numbers H and G have."""
        between = sum(
            self.units[s].count * sum(self.units[r].count for r in sources)
            for s, sources in enumerate(self.sources)
        )
        return between + len(self.ids) * self.classes

    def image_numbers(self) -> int:
        """How many numbers U and W have."""
        return self.image.count * (len(self.ids) + self.classes)

    def impulse_cost(self, source: int) -> int:
        """Multiply-adds of one impulse at a source: those of a unit in the middle, on paper."""
        units = self.image if source == IMAGE else self.units[source]
        if not units.count:
            return 0
        groups = list(units.groups())
        middle = groups[len(groups) // 2]
        one = Group(middle.start, middle.start + 1, middle.box)
        with FakeTensorMode(allow_non_fake_inputs=True):
            pushed = self.net.push(source, units.impulses(one, self.like), self.steps[source])
            for _ in pushed:
                pass
        return pushed.multiply_adds

    def cost(self) -> int:
        """Predicted multiply-adds of H and G."""
        return sum(u.count * self.impulse_cost(r) for r, u in enumerate(self.units))

    def build(self, with_image: bool) -> Form:
        """Push all impulses; U and W too if `with_image`."""
        counts = [u.count for u in self.units]
        rows = [{r: sum(counts[q] for q in sources if q < r) for r in sources}
                for sources in self.sources]  # fmt: skip
        heights = [sum(counts[r] for r in sources) for sources in self.sources]
        between = [self.like.new_zeros(h, n) for h, n in zip(heights, counts, strict=True)]
        out = self.like.new_zeros(len(self.ids), self.classes)
        image = self.like.new_zeros(self.image.count, len(self.ids)) if with_image else None
        image_out = self.like.new_zeros(self.image.count, self.classes) if with_image else None
        for source, group in self.batches(with_image):
            units = self.image if source == IMAGE else self.units[source]
            span = slice(group.start, group.stop)
            impulses = units.impulses(group, self.like)
            for node, value in self.net.push(source, impulses, self.steps[source]):
                if node is self.net.program.output:
                    shift = 0 if source == IMAGE else self.bounds[source]
                    target = image_out if source == IMAGE else out
                    assert target is not None
                    target[shift + span.start : shift + span.stop] = whole(value)
                if node not in self.site_of or not counts[self.site_of[node]]:
                    continue
                s = self.site_of[node]
                which, found = self.units[s].gather(value)
                if source == IMAGE:
                    assert image is not None
                    target = image[span, self.bounds[s] : self.bounds[s + 1]]
                else:
                    shift = rows[s][source]
                    target = between[s][shift + span.start : shift + span.stop]
                if which is None:
                    target.copy_(found)
                else:
                    target.index_copy_(1, which.to(target.device), found)
        between = [all_sum(b) for b in between]
        blocks = [self.nonzero(b, s) for s, b in enumerate(between)]
        constant, constant_out = self.at_taps(torch.zeros_like(self.like[:1]))
        if image is not None:
            # From tile order to that of the images' memory, channels last.
            back = torch.argsort(self.image.place).to(image.device)
            image, image_out = all_sum(image)[back], all_sum(image_out)[back]  # type: ignore[arg-type]
        return Form(
            self.ids, self.bounds, blocks, all_sum(out), constant[0], constant_out[0], image,
            image_out,
        )  # fmt: skip

    def batches(self, with_image: bool) -> Iterator[tuple[int, Group]]:
        """(source, group) of this rank, with a bar once it takes more than a moment."""
        sources = {IMAGE: self.image} if with_image else {}
        sources |= dict(enumerate(self.units))
        every = [(r, group) for r, units in sources.items() for group in units.groups()]
        mine = every[rank() :: world()]
        total = sum(g.stop - g.start for _, g in mine)
        hidden = True if rank() else None  # None: shown on a terminal
        with tqdm(total=total, desc="collapsing", unit=" impulses", delay=2.0, leave=False,
                  disable=hidden) as bar:  # fmt: skip
            for source, group in mine:
                yield source, group
                bar.update(group.stop - group.start)

    def nonzero(self, matrix: Tensor, s: int) -> list[Block]:
        """H's rows for site s as blocks of consecutive kinks, without sites that add nothing."""
        found: list[Block] = []
        row = 0
        for r in self.sources[s]:
            stop = row + self.units[r].count
            if matrix[row:stop].count_nonzero():
                start = self.bounds[r]
                if found and found[-1].stop == start:
                    start = found.pop().start
                height = self.bounds[r + 1] - start
                found.append(Block(start, self.bounds[r + 1], matrix[stop - height : stop]))
            row = stop
        whole_matrix = sum(b.stop - b.start for b in found) == len(matrix)
        return found if whole_matrix else [b._replace(matrix=b.matrix.clone()) for b in found]

    def at_taps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, ...] through the affine net: z at the kept ReLUs [B, R], logits."""
        z = x.new_empty(len(x), len(self.ids))
        logits = x
        for node, value in self.net.taps(x):
            if node in self.site_of and self.units[self.site_of[node]].count:
                s = self.site_of[node]
                z[:, self.bounds[s] : self.bounds[s + 1]] = self.units[s].gather(value)[1]
            if node is self.net.program.output:
                logits = value
        return z, logits
