"""Patches: images that are zero outside a box, and the linear operations that keep them small.

A unit impulse at one neuron reaches 3×3 positions after a 3×3 convolution, 5×5 after the next.
Only the box that it can have reached is stored and convolved:

    ┌──────────────┐
    │ 0    ┌────┐  │      value [n, C, h, w] lies at the rows and columns
    │      │ v  │  │      of its box in images [n, C, H, W]
    │      └────┘  │
    └──────────────┘

Impulses that run together should have boxes that overlap: `Positions` orders those of a site by
tiles, and cuts them into batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbcd.scoring.program import Convolution

Box = tuple[range, range]  # rows, columns
LARGE = 64  # impulses in a batch


class Patch(NamedTuple):
    """n images of size (H, W) that are zero outside a box."""

    value: Tensor  # [n, C, h, w]
    box: Box
    size: tuple[int, int]

    def within(self, box: Box) -> Tensor:
        """The numbers in another box: cropped, or extended with zeros."""
        if box == self.box:
            return self.value
        edges: list[
            int
        ] = []  # of columns, then rows: how many to add, or to cut if negative
        for here, wanted in zip(self.box, box, strict=True):
            if wanted.stop <= here.start or here.stop <= wanted.start:
                return self.value.new_zeros(*self.value.shape[:2], *map(len, box))
            edges = [here.start - wanted.start, wanted.stop - here.stop, *edges]
        return F.pad(self.value, edges)


Value = Patch | Tensor  # a Tensor is whole, of any shape


def full_box(size: Sequence[int]) -> Box:
    """All rows and columns of an image."""
    height, width = size
    return range(height), range(width)


def stored(value: Value) -> Tensor:
    """The numbers that are stored, [n, ...]."""
    if isinstance(value, Patch):
        return value.value
    return value


def with_numbers(value: Value, numbers: Tensor) -> Value:
    """Other numbers at the same positions."""
    if isinstance(value, Patch):
        return value._replace(value=numbers)
    return numbers


def whole(value: Value) -> Tensor:
    """The value as one tensor, with the zeros outside its box."""
    if isinstance(value, Patch):
        return value.within(full_box(value.size))
    return value


def common_box(values: Iterable[Patch]) -> Box:
    """The smallest box around all."""
    rows, columns = zip(*(value.box for value in values), strict=True)
    return bounding(rows), bounding(columns)


def bounding(lines: Sequence[range]) -> range:
    """The smallest range that contains all of some ranges."""
    return range(min(r.start for r in lines), max(r.stop for r in lines))


def convolve(x: Value, conv: Convolution) -> Patch:
    """conv2d without a bias, on the box and its surroundings only."""
    if (
        not isinstance(x, Patch)
        or x.box == full_box(x.size)
        or isinstance(conv.padding, str)
    ):
        y = conv(whole(x))
        height, width = y.shape[2:]
        return Patch(y, full_box((height, width)), (height, width))
    kernel = conv.weight.shape[2:]
    reach = [d * (k - 1) for d, k in zip(conv.dilation, kernel, strict=True)]
    unpadded = conv._replace(padding=(0, 0))
    return _windowed(x, unpadded, conv.stride, reach, conv.padding)


def subsample(x: Patch, rows: int, columns: int) -> Patch:
    """x[:, :, ::rows, ::columns]."""
    none = (0, 0)
    return _windowed(
        x, lambda v: v[:, :, ::rows, ::columns], (rows, columns), none, none
    )


def _windowed(x: Patch, run: Any, *windows: Sequence[int]) -> Patch:
    """run(inputs) for the outputs that read any number of the box.

    windows: stride, reach and padding; output o reads inputs o*stride - padding ... + reach.
    """
    inputs: Any = []
    outputs: Any = []
    size: Any = []
    for here, length, stride, reach, padding in zip(
        x.box, x.size, *windows, strict=True
    ):
        count = (length + 2 * padding - reach - 1) // stride + 1
        first = max(0, -(-(here.start + padding - reach) // stride))
        # Strides can step over the box: then one output is left, of zeros.
        last = min(count - 1, max(first, (here.stop - 1 + padding) // stride))
        first = min(first, last)
        inputs.append(
            range(first * stride - padding, last * stride - padding + reach + 1)
        )
        outputs.append(range(first, last + 1))
        size.append(count)
    return Patch(run(x.within(tuple(inputs))), tuple(outputs), tuple(size))


class ImpulseBatch(NamedTuple):
    """Positions start .. stop-1 of a site in its order, all inside a box."""

    start: int
    stop: int
    box: Box


class Positions:
    """The positions whose bits are set, of a site or an image, ordered by tile."""

    def __init__(self, bits: Tensor, device: torch.device, large: int = LARGE) -> None:
        """large: how many impulses run together."""
        self.shape = tuple(bits.shape)
        image = self.shape
        if len(image) != 3:  # one position with many channels
            image = (bits.numel(), 1, 1)
        self.channels, height, width = image
        self.size = (height, width)
        flat = bits.flatten().nonzero().flatten()
        self.count = len(flat)
        self.tile = tile_side(self.size, self.count * 8 // (large * 3))
        c, y, x = torch.unravel_index(flat, image)
        tile = y // self.tile * width + x // self.tile
        place = (y * width + x) * self.channels + c  # in channels_last memory
        order = torch.argsort(tile * bits.numel() + place)
        self.flat = flat[order]
        self.c, self.y, self.x, self.place = torch.stack([c, y, x, place])[:, order].to(
            device
        )
        self.batches = list(self._batches(tile[order], large))

    def _batches(self, tiles: Tensor, large: int) -> Iterator[ImpulseBatch]:
        """All positions in order, in parts of at most `large`; a batch shares a tile."""
        start = 0
        for tile, count in Counter(tiles.tolist()).items():
            corner = divmod(tile, self.size[1])
            box: Any = tuple(
                range(self.tile * k, min(self.tile * (k + 1), length))
                for k, length in zip(corner, self.size, strict=True)
            )
            parts = -(-count // large)
            cuts = [start + i * count // parts for i in range(parts + 1)]
            for low, high in pairwise(cuts):
                yield ImpulseBatch(low, high, box)
            start += count

    def impulses(self, batch: ImpulseBatch, like: Tensor) -> Value:
        """A 1 at each position of the batch, one image each: [n, ...] of like's dtype, device."""
        height, width = map(len, batch.box)
        place, _ = self._inside(batch.box, slice(batch.start, batch.stop))
        flat = like.new_zeros(len(place), height * width * self.channels)
        flat.scatter_(1, place[:, None], 1)
        if len(self.shape) != 3:
            return flat.view(-1, *self.shape)
        value = flat.view(-1, height, width, self.channels).movedim(-1, 1)
        return Patch(value, batch.box, self.size)

    def gather(self, value: Value) -> Tensor:
        """The values at the positions, [n, count]; those outside of a patch are zero."""
        if not isinstance(value, Patch):
            image = value.reshape(len(value), self.channels, *self.size)
            value = Patch(image, full_box(self.size), self.size)
        place, outside = self._inside(value.box, slice(None))
        flat = value.value.movedim(1, -1).flatten(1)
        values = flat.index_select(1, place.masked_fill(outside, 0))
        return values.masked_fill_(outside, 0)

    def _inside(self, box: Box, part: slice) -> tuple[Tensor, Tensor]:
        """The places of a part of the positions in the memory of a box; which lie outside of it."""
        height, width = map(len, box)
        y = self.y[part] - box[0].start
        x = self.x[part] - box[1].start
        outside = (y < 0) | (y >= height) | (x < 0) | (x >= width)
        return (y * width + x) * self.channels + self.c[part], outside


def tile_side(size: Sequence[int], tiles: int) -> int:
    """The smallest power of two that cuts an image into at most so many tiles, or into one."""
    height, width = size
    side = 1
    while side < max(size) and -(-height // side) * -(-width // side) > tiles:
        side *= 2
    return side
