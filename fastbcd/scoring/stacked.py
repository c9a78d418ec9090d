"""stacked: all hypotheses of a step in one pass per data batch, along a trial dimension.

For each batch the base net runs first. Then the hypotheses run together, as lanes of one
tensor [lanes, B, ...], folded into the batch for convolutions. A lane begins at the first
site that its hypothesis changes; everything before it is the base's value. Lanes are sorted by
that site, so the lanes that a value has are the first n of them:

    site      0        1        2
    base   ───────────────────────────▶ logits of the base
    lane 0    └────────────────────────▶
    lane 1             └───────────────▶
    lane 2             └───────────────▶
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fastbcd.masking.masks import MaskSet
from fastbcd.runtime.limits import cache_bytes
from fastbcd.scoring.engine import Request, difference_from_net
from fastbcd.scoring.program import Activation, Call, NotTraceable, Program

BATCH = 32  # images at a time, unless memory or the user says otherwise


class LaneGroup:
    """Hypotheses that run together, in the order of the first site that each changes.

    first[k]: the site where hypothesis k leaves the base, or the number of sites if never.
    """

    def __init__(self, program: Program, first: list[int], numbers: list[int]) -> None:
        sites = len(program.activations)
        # A hypothesis that removes nothing has no lane: its logits are the base's.
        moving = sorted((f, k) for f, k in zip(first, numbers, strict=True) if f < sites)
        self.numbers = [k for _, k in moving]
        begin = len(moving) if program.uniform else 0
        # count[node]: how many lanes a value has. reads: where lanes read the base's value.
        self.count: dict[fx.Node, int] = {program.placeholder: begin}
        self.reads: set[fx.Node] = {program.placeholder} if program.uniform else set()
        for step in program.steps:
            n = max((self.count.get(i, 0) for i in step.inputs), default=0)
            if isinstance(step, Activation):
                n = max(begin, sum(f <= step.site for f, _ in moving))
            self.count[step.node] = n
            self.reads |= {i for i in step.inputs if self.count.get(i, 0) < n}
        if self.count[program.output] < len(moving):
            self.reads.add(program.output)

    def __len__(self) -> int:
        return len(self.numbers)

    def masks(
        self, masks: MaskSet, removals: dict[int, Tensor], program: Program
    ) -> dict[int, Tensor]:
        """[lanes, *shape] uint8 by site: the base's bits less what each lane removes."""
        found = {}
        for step in program.activations:
            site = masks.sites[step.site]
            bits = masks.bits[site.start : site.start + site.numel].to(torch.uint8)
            lanes = bits.repeat(self.count[step.node], 1)
            for lane, k in zip(lanes, self.numbers, strict=False):
                ids = removals[k] - site.start
                lane[ids[(ids >= 0) & (ids < site.numel)]] = 0
            device = step.module.mask.device
            found[step.site] = channels_last(lanes.view(-1, *site.shape).to(device))
        return found


def first_change(masks: MaskSet, ids: Tensor) -> int:
    """The first site that a removal touches; the number of sites if it is empty."""
    if not ids.numel():
        return len(masks.sites)
    starts = torch.tensor([s.start for s in masks.sites])
    return int(torch.searchsorted(starts, ids.min(), right=True)) - 1


class Stacked:
    """The engine: a program of the net, and buffers that every batch uses again."""

    name = "stacked"
    memory_format = torch.channels_last

    def __init__(self, program: Program, masks: MaskSet) -> None:
        self.program, self.masks = program, masks
        bits = dict(enumerate(masks.split()))
        self.base_masks = [
            channels_last(bits[s.site].unsqueeze(0).to(s.module.mask.device, torch.uint8))
            for s in sorted(program.activations, key=lambda s: s.site)
        ]
        self.buffers: dict[fx.Node, Tensor] = {}

    def prepare(self, removals: dict[int, Tensor], lanes: int) -> list[tuple[LaneGroup, dict]]:
        """Hypotheses by number, cut into groups of at most `lanes` that begin near each other."""
        order = sorted(removals, key=lambda k: first_change(self.masks, removals[k]))
        groups = []
        for i in range(0, len(order), lanes):
            numbers = order[i : i + lanes]
            first = [first_change(self.masks, removals[k]) for k in numbers]
            group = LaneGroup(self.program, first, numbers)
            groups.append((group, group.masks(self.masks, removals, self.program)))
        return groups

    def logits(
        self, x: Tensor, groups: list[tuple[LaneGroup, dict]], base: bool
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(numbers, logits [n, B, classes]) of every hypothesis, and of the base as number -1."""
        reads: set[fx.Node] = set().union(*(lanes.reads for lanes, _ in groups))
        if base:
            reads.add(self.program.output)
        values = self.run_base(x, reads)
        if base:
            yield [-1], values[self.program.output].unsqueeze(0)
        for lanes, masks in groups:
            if len(lanes):
                yield lanes.numbers, self.run_lanes(values, lanes, masks)

    def run_base(self, x: Tensor, reads: set[fx.Node]) -> dict[fx.Node, Any]:
        """Run the base net as far as its values will be read, and keep those."""
        program = self.program
        missing = reads - {program.placeholder} - set(program.constants)
        values: dict[fx.Node, Any] = {**program.constants, program.placeholder: channels_last(x)}
        left = dict(program.uses)
        for step in program.steps:
            if not missing:
                break
            missing.discard(step.node)
            if isinstance(step, Call):
                values[step.node] = step(values)
            else:
                source = values[step.x].unsqueeze(0)
                residual = None if step.residual is None else values[step.residual].unsqueeze(0)
                out = source if step.x in program.fresh and step.x not in reads else None
                y = step.run(source, self.base_masks[step.site], residual, out)
                values[step.node] = y.squeeze(0)
            for node in step.inputs:
                left[node] -= 1
                if not left[node] and node not in reads and node not in program.constants:
                    del values[node]  # its memory serves the next step
        return values

    def run_lanes(
        self, base: dict[fx.Node, Any], lanes: LaneGroup, masks: dict[int, Tensor]
    ) -> Tensor:
        """The logits of the lanes, [lanes, B, classes], given the base's values."""
        program, count = self.program, lanes.count
        values: dict[fx.Node, Any] = {}
        left = dict(program.uses)
        if count[program.placeholder]:
            values[program.placeholder] = extend(None, base[program.placeholder], 0, len(lanes))
        for step in program.steps:
            n = count[step.node]
            if isinstance(step, Activation):
                if n:
                    values[step.node] = self.activate(step, base, values, lanes, masks[step.site])
            elif n:
                full = {
                    i: base[i] if i in program.constants
                    else extend(values.get(i), base.get(i), count[i], n)
                    for i in step.inputs
                }  # fmt: skip
                values[step.node] = step(full)
            for node in step.inputs:
                left[node] -= 1
                if not left[node]:
                    values.pop(node, None)
        node = program.output
        logits = extend(values.get(node), base.get(node), count[node], len(lanes))
        return logits.view(len(lanes), -1, logits.shape[-1])

    def activate(
        self,
        step: Activation,
        base: dict[fx.Node, Any],
        values: dict[fx.Node, Any],
        lanes: LaneGroup,
        masks: Tensor,
    ) -> Tensor:
        """One site for all lanes: those that run already, then those that begin here."""
        n, of_x = lanes.count[step.node], lanes.count[step.x]
        of_residual = 0 if step.residual is None else lanes.count[step.residual]
        some = values[step.x] if of_x else base[step.x]
        batch, shape = some.shape[0] // max(of_x, 1), some.shape[1:]
        if of_x == n and step.x in self.program.fresh:
            out = values[step.x].view(n, batch, *shape)
        else:
            out = self.buffer(step.node, n * batch, some).view(n, batch, *shape)

        def part(node: fx.Node, have: int, a: int, b: int) -> Tensor:
            """Lanes a to b of a value: their own, or the base's for all of them."""
            return values[node].view(have, batch, *shape)[a:b] if b <= have else base[node]

        cuts = sorted({0, of_x, of_residual, n})
        for a, b in pairwise(cuts):
            residual = None if step.residual is None else part(step.residual, of_residual, a, b)
            step.run(part(step.x, of_x, a, b), masks[a:b], residual, out[a:b])
        return out.view(n * batch, *shape)

    def buffer(self, node: fx.Node, items: int, like: Tensor) -> Tensor:
        """Memory [items, *like.shape[1:]] that belongs to this node, the same in every batch."""
        held = self.buffers.get(node)
        if held is None or held.shape[0] < items:
            held = channels_last(like.new_empty(items, *like.shape[1:]))
            self.buffers[node] = held
        return held[:items]

    def check(self, request: Request) -> None:
        """Refuse a net whose hypotheses affect each other when they share a batch."""
        if not difference_from_net(self, request, lanes=2) <= request.tolerance:
            raise NotTraceable(
                "as a program it gives other logits than as a module; they may depend on the rest "
                "of the batch"
            )


def channels_last(t: Tensor) -> Tensor:
    """[N, C, H, W] with C innermost; other shapes as they are."""
    return t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t


def extend(value: Any, base: Any, have: int, want: int) -> Any:
    """Values of `have` lanes for `want` lanes: the lanes that are missing are the base's."""
    if have == want:
        return value

    def repeat(t: Any) -> Any:
        if not isinstance(t, Tensor):
            raise NotTraceable("a number taken from one tensor meets another tensor")
        return t.repeat(want - have, *(1,) * (t.ndim - 1))

    missing = tree_map(repeat, base)
    return missing if have == 0 else tree_map(lambda v, b: torch.cat([v, b]), value, missing)


# ------------------------------------------------------------------------- costs and portions


def stacked_multiply_adds(request: Request, program: Program) -> int:
    """Of the base and all hypotheses, each from its first changed site on, over all images."""
    begins = [first_change(request.masks, ids) for ids in request.removals]
    lanes = LaneGroup(program, begins, list(range(len(begins))))
    of_lanes = sum(program.multiply_adds[node] * n for node, n in lanes.count.items())
    of_all = of_lanes * request.hypotheses // max(len(begins), 1)
    return (sum(program.multiply_adds.values()) + of_all) * request.images


def peak_bytes(program: Program) -> int:
    """Bytes for one image at the worst step, and of the buffers that are held for all steps."""
    left = dict(program.uses)
    sizes, sites = program.bytes_per_image, program.activations
    held = sum(sizes[s.node] for s in sites if s.x not in program.fresh)
    # Where lanes begin, an activation cannot be in place: the largest such, to be safe.
    held += max((sizes[s.node] for s in sites if s.x in program.fresh), default=0)
    alive = sizes.get(program.placeholder, 0)
    worst = alive
    for step in program.steps:
        reused = step.x if isinstance(step, Activation) and step.x in program.fresh else None
        alive += 0 if reused else sizes.get(step.node, 0)
        worst = max(worst, alive)
        for node in step.inputs:
            left[node] -= 1
            if not left[node] and node not in program.constants:
                alive -= 0 if node is reused else sizes.get(node, 0)
    return worst + held


def portions(request: Request, per_image: int, largest: int) -> tuple[int, int]:
    """(images, hypotheses) at a time.

    per_image: bytes of all values alive at once, largest: bytes of the largest single value.
    """
    together = request.memory // max(per_image, 1)
    if request.example.device.type == "cpu":
        # A value written by one step should still be in the cache when the next one reads it,
        # and fresh memory beyond it costs more in page faults than the convolution; but a
        # convolution of fewer images than a batch is not efficient.
        together = min(together, max(BATCH, cache_bytes() // (8 * largest)))
    together = max(together, 1)
    batch = request.batch_size or min(BATCH, together)
    lanes = max(1, min(max(request.hypotheses, 1), together // batch))
    return min(batch, max(request.images, 1)), lanes
