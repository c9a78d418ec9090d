"""Patches: images that are zero outside a box, and the linear operations that keep them small.

A unit impulse at one neuron reaches 3×3 positions after a 3×3 convolution, 5×5 after the next.
Only the box that it can have reached is stored and convolved:

    ┌──────────────┐
    │ 0    ┌────┐  │      value [n, C, h, w] lies at rows top .. top+h-1 and
    │      │ v  │  │      columns left .. left+w-1 of images [n, C, H, W]
    │      └────┘  │
    └──────────────┘

Impulses that run together should have boxes that overlap: `Positions` orders those of a site by
tiles, and cuts them into batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbcd.scoring.program import Convolution

Box = tuple[int, int, int, int]  # top, left, bottom, right, the last two exclusive
LARGE = 64  # impulses in a batch


class Patch(NamedTuple):
    """n images of size (H, W) that are zero outside a box."""

    value: Tensor  # [n, C, h, w]
    top: int
    left: int
    size: tuple[int, int]

    @property
    def box(self) -> Box:
        height, width = self.value.shape[2:]
        return self.top, self.left, self.top + height, self.left + width

    def within(self, box: Box) -> Tensor:
        """The numbers in another box: cropped, or extended with zeros."""
        if box == self.box:
            return self.value
        top, left, bottom, right = self.box
        edges = (left - box[1], box[3] - right, top - box[0], box[2] - bottom)  # to add, or to cut
        if bottom <= box[0] or box[2] <= top or right <= box[1] or box[3] <= left:
            return self.value.new_zeros(*self.value.shape[:2], box[2] - box[0], box[3] - box[1])
        return F.pad(self.value, edges)


Value = Patch | Tensor  # a Tensor is whole, of any shape


def stored(value: Value) -> Tensor:
    """The numbers that are stored, [n, ...]."""
    return value.value if isinstance(value, Patch) else value


def whole(value: Value) -> Tensor:
    """The value as one tensor, with the zeros outside its box."""
    return value.within((0, 0, *value.size)) if isinstance(value, Patch) else value


def aligned(values: Sequence[Any]) -> tuple[list[Tensor], Callable[[Tensor], Value]]:
    """The numbers of values in the smallest box around all, and how to make a value of such."""
    if not all(isinstance(v, Patch) for v in values):
        return [whole(v) for v in values], lambda t: t
    tops, lefts, bottoms, rights = zip(*(v.box for v in values), strict=True)
    box = (min(tops), min(lefts), max(bottoms), max(rights))
    return [v.within(box) for v in values], lambda t: Patch(t, box[0], box[1], values[0].size)


def convolve(x: Value, conv: Convolution) -> Patch:
    """conv2d without its bias, on the box and its surroundings only."""
    if not isinstance(x, Patch) or x.box == (0, 0, *x.size):
        y = conv._replace(bias=None)(stored(x))
        return Patch(y, 0, 0, (y.shape[2], y.shape[3]))
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.weight.shape[2:], strict=True)]
    if isinstance(conv.padding, str):
        both = reach if conv.padding == "same" else [0, 0]
        before = [b // 2 for b in both]
    else:
        before, both = list(conv.padding), [2 * p for p in conv.padding]
    return _windows(x, conv._replace(bias=None, padding=(0, 0)), conv.stride, reach, before, both)


def subsample(x: Patch, rows: int, columns: int) -> Patch:
    """x[:, :, ::rows, ::columns]."""
    none = [0, 0]
    return _windows(x, lambda v: v[:, :, ::rows, ::columns], (rows, columns), none, none, none)


def _windows(x: Patch, run: Any, stride: Sequence[int], *edges: list[int]) -> Patch:
    """run(x), whose output o reads x at o*stride - before ... + reach.

    edges: reach; before and both, the padding before and in all.
    """
    spans = []
    for d, (reach, before, both) in enumerate(zip(*edges, strict=True)):
        length = (x.size[d] + both - reach - 1) // stride[d] + 1
        first = max(0, math.ceil((x.box[d] + before - reach) / stride[d]))
        # Strides can step over the box: then one position is left, of zeros.
        last = min(length - 1, max(first, (x.box[2 + d] - 1 + before) // stride[d]))
        first = min(first, last)
        start = first * stride[d] - before
        spans.append((first, length, start, start + (last - first) * stride[d] + reach + 1))
    (top, height, *rows), (left, width, *columns) = spans
    seen = x.within((rows[0], columns[0], rows[1], columns[1]))
    return Patch(run(seen), top, left, (height, width))


class ImpulseBatch(NamedTuple):
    """Positions start .. stop-1 of a site in its order, all inside a box."""

    start: int
    stop: int
    box: Box


class Positions:
    """The positions whose bits are set, of a site or an image, ordered by tile."""

    def __init__(self, bits: Tensor, device: torch.device, large: int = LARGE) -> None:
        shape = self.shape = tuple(bits.shape)
        flat = bits.flatten().nonzero().flatten()
        self.count = len(flat)
        # A site of another rank is one position with many channels.
        self.channels, height, width = shape if len(shape) == 3 else (math.prod(shape), 1, 1)
        self.size = (height, width)
        c, y, x = flat // (height * width), flat // width % height, flat % width
        # The smallest power of two for which tiles hold 3/8 of a batch on average.
        side, few = 1, self.count * 8 // (large * 3)
        while side < max(height, width) and few < -(-height // side) * -(-width // side):
            side *= 2
        self.tile = side
        tile = y // self.tile * width + x // self.tile
        place = (y * width + x) * self.channels + c  # in channels_last memory
        order = torch.argsort(tile * math.prod(shape) + place)
        self.flat = flat[order]
        self.c, self.y, self.x, self.place = torch.stack([c, y, x, place])[:, order].to(device)
        rows = torch.bincount(y // self.tile, minlength=-(-height // self.tile))
        self.row_starts = [0, *rows.cumsum(0).tolist()]  # positions before each row of tiles
        self.batches: list[ImpulseBatch] = []  # all positions in order; a batch shares a tile
        start = 0
        for key, n in zip(*(t.tolist() for t in tile.unique(return_counts=True)), strict=True):
            top, left = key // width * self.tile, key % width * self.tile
            box = (top, left, min(top + self.tile, height), min(left + self.tile, width))
            pieces = -(-n // large)
            cuts = [start + i * n // pieces for i in range(pieces + 1)]
            self.batches += [ImpulseBatch(a, b, box) for a, b in pairwise(cuts)]
            start += n

    def impulses(self, batch: ImpulseBatch, like: Tensor) -> Value:
        """A 1 at each position of the batch, one image each: [n, ...] of like's dtype, device."""
        top, left, bottom, right = batch.box
        place, _ = self._inside(batch.box, slice(batch.start, batch.stop))
        flat = like.new_zeros(len(place), (bottom - top) * (right - left) * self.channels)
        flat.scatter_(1, place[:, None], 1)
        if len(self.shape) != 3:
            return flat.view(-1, *self.shape)
        value = flat.view(-1, bottom - top, right - left, self.channels).movedim(-1, 1)
        return Patch(value, top, left, self.size)

    def gather(self, value: Value) -> tuple[slice, Tensor]:
        """(numbers of positions, their values [n, ...]); the value is zero at all others."""
        if not isinstance(value, Patch):
            value = Patch(value.reshape(len(value), self.channels, *self.size), 0, 0, self.size)
        flat = value.value.movedim(1, -1).flatten(1)
        if value.box == (0, 0, *self.size):
            return slice(None), flat.index_select(1, self.place)
        # The rows of tiles that the box meets.
        first, last = value.top // self.tile, (value.box[2] - 1) // self.tile
        some = slice(self.row_starts[first], self.row_starts[last + 1])
        place, outside = self._inside(value.box, some)
        found = flat.index_select(1, place.masked_fill(outside, 0))
        return some, found.masked_fill_(outside, 0)

    def _inside(self, box: Box, some: slice) -> tuple[Tensor, Tensor]:
        """The places of some positions in the memory of a box, and which lie outside of it."""
        top, left, bottom, right = box
        y, x = self.y[some] - top, self.x[some] - left
        outside = (y < 0) | (y >= bottom - top) | (x < 0) | (x >= right - left)
        return (y * (right - left) + x) * self.channels + self.c[some], outside
