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
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fastbcd.masking.masks import MaskSet
from fastbcd.runtime.limits import cache_bytes
from fastbcd.scoring.engine import Request, difference_from_net
from fastbcd.scoring.program import (
    Activation,
    NotTraceable,
    Operation,
    Program,
    channels_last,
)
from fastbcd.scoring.sequential import Outputs

BATCH = 32  # images at a time, unless memory or the user says otherwise
# Multiply-adds of a step beside which the time of its call is small, on a CPU.
STEP_WORK = 2e7
GPU_ITEMS = 4096  # images times hypotheses that run together on a GPU, if memory allows
Values = dict[fx.Node, Any]
SiteMasks = dict[int, Tensor]  # uint8 [lanes, *shape] by site in use


class LaneGroup(NamedTuple):
    """Hypotheses that run together, in the order of the first site that each changes."""

    numbers: list[int]
    removals: list[Tensor]  # ids by lane
    lane_count: dict[fx.Node, int]  # of each value
    reads: set[fx.Node]  # values of the base that lanes read


class Lanes(NamedTuple):
    """Lanes of values that run together, beside those of the base."""

    lane_count: dict[fx.Node, int]  # of each value
    masks: SiteMasks
    base: Values  # empty for the base itself
    keep: set[fx.Node]  # values to return, beside the outputs


def lane_counts(program: Program, begins: list[int]) -> dict[fx.Node, int]:
    """How many lanes each value has, of lanes that leave the base at the sites `begins`."""
    count = {program.placeholder: 0}
    for step in program.steps:
        inputs = [count.get(node, 0) for node in step.inputs]
        if isinstance(step, Activation):
            inputs = [sum(site <= step.site for site in begins)]
        count[step.node] = max(inputs, default=0)
        if program.uniform:
            count[step.node] = len(begins)
    return count


def first_change(masks: MaskSet, ids: Tensor) -> int:
    """The first site that a removal touches; the number of sites if it is empty."""
    starts = [site.start for site in masks.sites]
    if not len(ids):
        return len(starts)
    return bisect_right(starts, int(ids.min())) - 1


class Stacked:
    """The engine: a program of the net, for the base and for lanes."""

    name = "stacked"
    memory_format = torch.channels_last
    fast = "bf16"

    def __init__(self, program: Program, masks: MaskSet) -> None:
        self.program = program
        self.masks = masks
        self.site_masks = {step.site: step.module.mask for step in program.activations}
        device = next((mask.device for mask in self.site_masks.values()), None)
        self.bits = masks.bits.to(device, torch.uint8)
        self.base_masks = self.lane_masks([torch.empty(0, dtype=torch.int64)])
        self.group_masks: tuple[Any, SiteMasks] = (None, {})  # of the last group

    def lane_masks(self, removals: list[Tensor]) -> SiteMasks:
        """The base's bits less what each lane removes."""
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
        begin = {
            k: first_change(self.masks, ids) for k, ids in removals.items() if len(ids)
        }
        order = sorted(begin, key=lambda k: (begin[k], k))
        groups = []
        for i in range(0, len(order), lanes):
            numbers = order[i : i + lanes]
            ids = [removals[k].to(self.bits.device) for k in numbers]
            count = lane_counts(self.program, [begin[k] for k in numbers])
            groups.append(
                LaneGroup(numbers, ids, count, self.reads(count, len(numbers)))
            )
        return groups

    def reads(self, count: dict[fx.Node, int], n: int) -> set[fx.Node]:
        """The values of the base that n lanes read: those that some of the lanes lack."""
        program = self.program
        reads = {node for node in program.outputs if count.get(node, 0) < n}
        for step in program.steps:
            lanes = count[step.node]
            reads.update(node for node in step.inputs if count.get(node, 0) < lanes)
        return reads

    def logits(
        self,
        x: Tensor,
        groups: list[LaneGroup],
        base: bool,
        images: Tensor | None = None,
    ) -> Outputs:
        """(numbers, outputs [n, B, ...]) of every hypothesis, and of the base as number -1."""
        reads: set[fx.Node] = set()
        reads = reads.union(*(group.reads for group in groups))
        if base:
            reads.update(self.program.outputs)
        alone = self.base_lanes(reads)
        values = self.run({self.program.placeholder: channels_last(x)}, alone)
        if base and not groups:
            yield [-1], self.outputs(values, alone, 1)
        for group in groups:
            numbers = group.numbers
            if base and group is groups[0]:
                # A lane that lacks values of its own has those of the base.
                numbers = [*numbers, -1]
            lanes = Lanes(group.lane_count, self.masks_of(group), values, set())
            yield numbers, self.outputs(self.run({}, lanes), lanes, len(numbers))

    def base_lanes(self, reads: set[fx.Node]) -> Lanes:
        """One lane of the base; no step runs after the last one that is read."""
        steps = self.program.steps
        last = max(
            (i for i, step in enumerate(steps) if step.node in reads), default=-1
        )
        count = {step.node: int(i <= last) for i, step in enumerate(steps)}
        count[self.program.placeholder] = 1
        return Lanes(count, self.base_masks, {}, reads)

    def masks_of(self, group: LaneGroup) -> SiteMasks:
        """The memory holds the masks of one group at a time."""
        if self.group_masks[0] is not group:
            self.group_masks = (None, {})
            self.group_masks = (group, self.lane_masks(group.removals))
        return self.group_masks[1]

    def outputs(self, values: Values, lanes: Lanes, n: int) -> Any:
        """The outputs [n, B, ...] of n lanes in the structure that the net returns."""

        def output(node: fx.Node) -> Tensor:
            return in_lanes(node, values, lanes, n).unflatten(0, (n, -1))

        return fx.node.map_arg(self.program.output, output)

    def run(self, values: Values, lanes: Lanes) -> Values:
        """Run the steps that have lanes; the lanes that an input lacks are those of the base."""
        program = self.program
        for step, unread in zip(program.steps, program.last_uses, strict=True):
            n = lanes.lane_count[step.node]
            if n and isinstance(step, Activation):
                values[step.node] = self.activate(step, values, lanes)
            elif n and isinstance(step, Operation):
                inputs = dict(program.constants)
                for node in step.inputs:
                    if node not in program.constants:
                        inputs[node] = in_lanes(node, values, lanes, n)
                values[step.node] = step(inputs)
                del inputs
            for node in unread:
                if node not in lanes.keep:
                    values.pop(node, None)  # its memory serves the next step
        return values

    def activate(self, step: Activation, values: Values, lanes: Lanes) -> Tensor:
        """One site for all lanes: those that run already, then those that begin here."""
        count = lanes.lane_count
        n = count[step.node]
        of_x = count[step.x]
        x = values[step.x] if of_x else lanes.base[step.x]
        batch = len(x) // max(of_x, 1)
        out = x
        if of_x < n or step.x not in self.program.fresh or step.x in lanes.keep:
            layout = torch.channels_last if x.ndim == 4 else torch.contiguous_format
            out = torch.empty(
                (n * batch, *x.shape[1:]),
                dtype=x.dtype,
                device=x.device,
                memory_format=layout,
            )

        def part(node: fx.Node, first: int, last: int) -> Tensor:
            """Some lanes of a value: their own, or the base's for all of them."""
            if last > count[node]:
                return lanes.base[node]
            return values[node].unflatten(0, (count[node], batch))[first:last]

        masks = lanes.masks[step.site]
        written = out.unflatten(0, (n, batch))
        for first, last in pairwise(
            sorted({0, n, *(count[node] for node in step.inputs)})
        ):
            residual = None
            if step.residual is not None:
                residual = part(step.residual, first, last)
            x = part(step.x, first, last)
            step.run(x, masks[first:last], residual, written[first:last])
        return out

    def check(self, request: Request) -> None:
        """Refuse a net whose hypotheses affect each other when they share a batch."""
        try:
            difference = difference_from_net(self, request, lanes=2)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise NotTraceable(
                f"as a program it fails: {str(error).splitlines()[0]}"
            ) from error
        if not difference <= request.tolerance:
            raise NotTraceable(
                "as a program it gives other logits than as a module; they may depend on the rest "
                "of the batch"
            )


def in_lanes(node: fx.Node, values: Values, lanes: Lanes, n: int) -> Any:
    """A value for n lanes: those that it lacks are the base's."""
    have = lanes.lane_count.get(node, 0)
    if have == n:
        return values[node]

    def joined(*parts: Any) -> Tensor:
        if not isinstance(parts[-1], Tensor):
            raise NotTraceable("a number taken from one tensor meets another tensor")
        return torch.cat(parts)

    parts = [lanes.base[node]] * (n - have)
    if have:
        parts.insert(0, values[node])
    return tree_map(joined, *parts)


def stacked_multiply_adds(request: Request, program: Program) -> int:
    """Of the base and all hypotheses, each from its first changed site on, over all images."""
    begins = [first_change(request.masks, ids) for ids in request.removals if len(ids)]
    count = lane_counts(program, begins)
    of_lanes = sum(program.multiply_adds[node] * n for node, n in count.items())
    of_all = of_lanes * request.hypotheses // max(len(request.removals), 1)
    return (program.forward + of_all) * request.images


def peak_bytes(program: Program) -> int:
    """Bytes for one image at the worst step."""
    sizes = program.bytes_per_image
    alive = sizes[program.placeholder]
    worst = alive
    for step, unread in zip(program.steps, program.last_uses, strict=True):
        freed = {node: sizes.get(node, 0) for node in unread}
        if isinstance(step, Activation) and step.x in program.fresh:
            freed.pop(step.x, None)  # its memory is that of the result
        else:
            alive += sizes.get(step.node, 0)
        worst = max(worst, alive)
        alive -= sum(freed.values())
    # Where lanes begin, an activation cannot be in place: the largest such, to be safe.
    in_place = [
        sizes[step.node] for step in program.activations if step.x in program.fresh
    ]
    return worst + max(in_place, default=0)


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
        busy = min(128, int(STEP_WORK // max(work, 1)))
        together = min(together, max(BATCH, cache_bytes() // (8 * largest), 2 * busy))
        batch = min(max(BATCH, busy), together)
    else:
        # A GPU is busy with many images at a time; a wave has few hypotheses.
        lanes = max(1, min(hypotheses, together // BATCH))
        batch = min(together // lanes, max(BATCH, GPU_ITEMS // lanes))
    batch = min(request.batch_size or batch, max(request.images, 1))
    return batch, max(1, min(hypotheses, together // batch))
