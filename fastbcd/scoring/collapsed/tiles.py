"""The positions of a site, ordered and cut into batches that lie near each other.

Impulses of a batch run together, so their boxes should overlap: a site [C, H, W] is cut into
tiles, and its positions are taken tile by tile. The positions of other sites keep their order.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fastbcd.scoring.collapsed.patches import Box, Patch, Value

LARGE = 64  # impulses in a batch


class ImpulseBatch(NamedTuple):
    """Positions start .. stop-1 of a site in its order, all inside a box."""

    start: int
    stop: int
    box: Box


class Positions:
    """Some positions of a flattened site or image; `order` sorts them by tile."""

    def __init__(
        self, shape: tuple[int, ...], positions: Tensor, device: torch.device, large: int = LARGE
    ) -> None:
        self.shape, self.count = shape, len(positions)
        # A site of another rank is one position with many channels.
        cube = shape if len(shape) == 3 else (math.prod(shape), 1, 1)
        self.channels, height, width = cube
        self.size = (height, width)
        c, y, x = positions // (height * width), positions // width % height, positions % width
        self.tile = tile_side(self.count, height, width, large)
        tile = y // self.tile * width + x // self.tile
        place = (y * width + x) * self.channels + c  # in channels_last memory
        self.order = torch.argsort(tile * math.prod(shape) + place)
        self.c, self.y, self.x, self.place = (t[self.order].to(device) for t in (c, y, x, place))
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


def tile_side(count: int, height: int, width: int, large: int = LARGE) -> int:
    """The smallest power of two for which tiles hold 3/8 of a batch on average.

    >>> tile_side(3072, 32, 32), tile_side(3072, 4, 4), tile_side(10, 32, 32)
    (4, 1, 32)
    """
    side, small = 1, large * 3 // 8
    while side < max(height, width) and count < small * -(-height // side) * -(-width // side):
        side *= 2
    return side
