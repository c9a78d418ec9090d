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

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fastbcd.masking.masks import MaskSet
from fastbcd.runtime.limits import cache_bytes
from fastbcd.scoring.engine import Request, difference_from_net
from fastbcd.scoring.program import Activation, NotTraceable, Operation, Program
from fastbcd.scoring.sequential import Outputs

BATCH = 32  # images at a time, unless memory or the user says otherwise
STEP_WORK = 2e7  # multiply-adds of a step beside which the time of its call is small, on a CPU
GPU_ITEMS = 4096  # images times hypotheses that run together on a GPU, if memory allows
Values = dict[fx.Node, Any]


@dataclass
class LaneGroup:
    """Hypotheses that run together, in the order of the first site that each changes."""

    numbers: list[int]
    count: dict[fx.Node, int]  # how many lanes a value has
    reads: set[fx.Node]  # values of the base that lanes read
    removals: list[Tensor]  # ids by lane
    masks: dict[int, Tensor]  # uint8 [lanes, *shape] by site; made when they are needed
    keep: set[fx.Node]  # values that are read after the last step


def lane_counts(program: Program, begins: list[int]) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """`count` and `reads` of lanes that leave the base at the sites `begins`."""
    first = len(begins) if program.uniform else 0
    count = {program.placeholder: first}
    reads = {program.placeholder} if program.uniform else set()
    for step in program.steps:
        n = max((count.get(i, 0) for i in step.inputs), default=0)
        if isinstance(step, Activation):
            n = max(first, sum(site <= step.site for site in begins))
        count[step.node] = n
        reads |= {i for i in step.inputs if count.get(i, 0) < n}
    reads |= {node for node in program.outputs if count.get(node, 0) < len(begins)}
    return count, reads


def first_change(masks: MaskSet, ids: Tensor) -> int:
    """The first site that a removal touches; the number of sites if it is empty."""
    starts = [site.start for site in masks.sites]
    return bisect_right(starts, int(ids.min())) - 1 if ids.numel() else len(starts)


class Stacked:
    """The engine: a program of the net, for the base and for lanes."""

    name = "stacked"
    memory_format = torch.channels_last

    def __init__(self, program: Program, masks: MaskSet) -> None:
        self.program, self.masks = program, masks
        self.site_masks = {step.site: step.module.mask for step in program.activations}
        device = next((mask.device for mask in self.site_masks.values()), None)
        self.bits = masks.bits.to(device, torch.uint8)
        self.base_masks = self.lane_masks([torch.empty(0, dtype=torch.int64)])

    def lane_masks(self, removals: list[Tensor]) -> dict[int, Tensor]:
        """[lanes, *shape] uint8 by site in use: the base's bits less what each lane removes."""
        lanes = self.bits.repeat(len(removals), 1)
        for lane, ids in zip(lanes, removals, strict=True):
            lane.index_fill_(0, ids.to(lane.device), 0)
        parts = lanes.split([site.numel for site in self.masks.sites], dim=1)
        return {
            site: channels_last(parts[site].reshape(-1, *mask.shape).to(mask.device))
            for site, mask in self.site_masks.items()
        }

    def prepare(self, removals: dict[int, Tensor], lanes: int) -> list[LaneGroup]:
        """Hypotheses by number, cut into groups of at most `lanes` that begin near each other."""
        begin = {k: first_change(self.masks, ids) for k, ids in removals.items() if ids.numel()}
        order = sorted(begin, key=lambda k: (begin[k], k))
        groups = []
        for i in range(0, len(order), lanes):
            numbers = order[i : i + lanes]
            count, reads = lane_counts(self.program, [begin[k] for k in numbers])
            ids = [removals[k].to(self.bits.device) for k in numbers]
            groups.append(LaneGroup(numbers, count, reads, ids, {}, set()))
        return groups

    def logits(
        self, x: Tensor, groups: list[LaneGroup], base: bool, images: Tensor | None = None
    ) -> Outputs:
        """(numbers, outputs [n, B, ...]) of every hypothesis, and of the base as number -1."""
        program, start = self.program, self.program.placeholder
        reads = set(program.outputs if base else ()).union(*(group.reads for group in groups))
        last = max((i for i, s in enumerate(program.steps) if s.node in reads), default=-1)
        needed = {s.node: int(i <= last) for i, s in enumerate(program.steps)}
        one = LaneGroup([-1], {start: 1, **needed}, set(), [], self.base_masks, reads)
        values = self.run(one, {start: channels_last(x)}, {})

        def output(node: fx.Node) -> Tensor:
            return extend(own.get(node), values.get(node), count.get(node, 0), n).unflatten(
                0, (n, len(x))
            )

        if base:
            n, count, own = 1, one.count, values
            yield [-1], fx.node.map_arg(program.output, output)
        for group in groups:
            n, count, own = len(group.numbers), group.count, {}
            if count[start]:
                own[start] = extend(None, values[start], 0, n)
            group.masks = group.masks or self.lane_masks(group.removals)
            own = self.run(group, own, values)
            if len(groups) > 1:
                group.masks = {}  # the memory holds the masks of one group at a time
            yield group.numbers, fx.node.map_arg(program.output, output)

    def run(self, group: LaneGroup, values: Values, base: Values) -> Values:
        """Run the steps that have lanes; the lanes that an input lacks are those of the base.

        base: values of the base; none to compute them. Returned are the values in `group.keep`.
        """
        program, count = self.program, group.count
        left = dict(program.uses)
        for step in program.steps:
            n = count[step.node]
            if n and isinstance(step, Activation):
                values[step.node] = self.activate(step, group, values, base)
            elif n and isinstance(step, Operation):
                own = [i for i in step.inputs if i not in program.constants]
                full = {i: extend(values.get(i), base.get(i), count[i], n) for i in own}
                values[step.node] = step({**program.constants, **full})
            for node in step.inputs:
                left[node] -= 1
                if not left[node] and node not in group.keep:
                    values.pop(node, None)  # its memory serves the next step
        return values

    def activate(self, step: Activation, group: LaneGroup, values: Values, base: Values) -> Tensor:
        """One site for all lanes: those that run already, then those that begin here."""
        count, masks = group.count, group.masks[step.site]
        n, of_x = count[step.node], count[step.x]
        of_residual = 0 if step.residual is None else count[step.residual]
        some = values[step.x] if of_x else base[step.x]
        batch, shape = some.shape[0] // max(of_x, 1), some.shape[1:]
        if of_x == n and step.x in self.program.fresh and step.x not in group.keep:
            out = some
        else:
            layout = torch.channels_last if some.ndim == 4 else torch.contiguous_format
            out = torch.empty(
                n * batch, *shape, dtype=some.dtype, device=some.device, memory_format=layout
            )
        lanes = out.view(n, batch, *shape)

        def part(node: fx.Node, have: int, a: int, b: int) -> Tensor:
            """Lanes a to b of a value: their own, or the base's for all of them."""
            return values[node].view(have, batch, *shape)[a:b] if b <= have else base[node]

        for a, b in pairwise(sorted({0, of_x, of_residual, n})):
            residual = None if step.residual is None else part(step.residual, of_residual, a, b)
            step.run(part(step.x, of_x, a, b), masks[a:b], residual, lanes[a:b])
        return out

    def check(self, request: Request) -> None:
        """Refuse a net whose hypotheses affect each other when they share a batch."""
        try:
            difference = difference_from_net(self, request, lanes=2)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise NotTraceable(f"as a program it fails: {str(error).splitlines()[0]}") from error
        if not difference <= request.tolerance:
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


def stacked_multiply_adds(request: Request, program: Program) -> int:
    """Of the base and all hypotheses, each from its first changed site on, over all images."""
    begins = [first_change(request.masks, ids) for ids in request.removals if ids.numel()]
    count, _ = lane_counts(program, begins)
    of_lanes = sum(program.multiply_adds[node] * n for node, n in count.items())
    of_all = of_lanes * request.hypotheses // max(len(request.removals), 1)
    return (sum(program.multiply_adds.values()) + of_all) * request.images


def peak_bytes(program: Program) -> int:
    """Bytes for one image at the worst step."""
    left, sizes, sites = dict(program.uses), program.bytes_per_image, program.activations
    # Where lanes begin, an activation cannot be in place: the largest such, to be safe.
    extra = max((sizes[s.node] for s in sites if s.x in program.fresh), default=0)
    worst = alive = sizes.get(program.placeholder, 0)
    for step in program.steps:
        reused = step.x if isinstance(step, Activation) and step.x in program.fresh else None
        alive += 0 if reused else sizes.get(step.node, 0)
        worst = max(worst, alive)
        for node in step.inputs:
            left[node] -= 1
            if not left[node] and node not in program.constants:
                alive -= 0 if node is reused else sizes.get(node, 0)
    return worst + extra


def portions(
    request: Request, per_image: int, largest: int, work: float = torch.inf
) -> tuple[int, int]:
    """(images, hypotheses) at a time.

    per_image: bytes of all values alive at once, largest: bytes of the largest single value,
    work: multiply-adds of a step, each for one image.
    """
    together = max(1, request.memory // max(per_image, 1))
    hypotheses = max(request.hypotheses, 1)
    if request.example.device.type == "cpu":
        # A value written by one step should still be in the cache when the next one reads it,
        # and fresh memory beyond it costs more in page faults than the convolution; but a
        # convolution of fewer images than a batch is not efficient.
        # Steps with little work take more images, so that the time of their calls is small.
        busy = min(128, STEP_WORK // max(work, 1))
        together = min(together, max(BATCH, cache_bytes() // (8 * largest), 2 * int(busy)))
        batch = min(max(BATCH, int(busy)), together)
    else:
        # A GPU is busy with many images at a time; a wave has few hypotheses.
        lanes = max(1, min(hypotheses, together // BATCH))
        batch = min(together // lanes, max(BATCH, GPU_ITEMS // lanes))
    batch = request.batch_size or batch
    return min(batch, max(request.images, 1)), max(1, min(hypotheses, together // batch))
