"""The positions of a site, ordered and cut into batches that lie near each other.

Impulses of a batch run together, so their boxes should overlap: a site [C, H, W] is cut into
tiles, and its positions are taken tile by tile. The positions of other sites keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastbcd.scoring.collapsed.patches import Box, Patch, Value

SMALL, LARGE = 24, 64  # impulses in a batch: tiles grow until they hold SMALL, and split at LARGE


class ImpulseBatch(NamedTuple):
    """Positions start .. stop-1 of a site in its order, all inside a box."""

    start: int
    stop: int
    box: Box


class Positions:
    """Some positions of a flattened site or image; `order` sorts them by tile."""

    def __init__(self, shape: tuple[int, ...], positions: Tensor) -> None:
        self.shape, self.count = shape, len(positions)
        self.spatial = len(shape) == 3
        self.tile = 0
        if self.spatial:
            _, height, width = shape
            c, y, x = positions // (height * width), positions // width % height, positions % width
            self.tile = tile_side(self.count, height, width)
            across = -(-width // self.tile)
            key = ((y // self.tile) * across + x // self.tile) * shape[0] * height * width
            self.order = torch.argsort(key + (y * width + x) * shape[0] + c)
            self.c, self.y, self.x = c[self.order], y[self.order], x[self.order]
            self.place = (self.y * width + self.x) * shape[0] + self.c  # in channels_last memory
        else:
            self.order = torch.arange(self.count)
            self.place = positions

    def batches(self) -> Iterator[ImpulseBatch]:
        """All positions in order, in batches of at most LARGE that share a tile."""
        if not self.spatial:
            for start in range(0, self.count, LARGE):
                yield ImpulseBatch(start, min(start + LARGE, self.count), (0, 0, 0, 0))
            return
        _, height, width = self.shape
        tiles = torch.stack([self.y // self.tile, self.x // self.tile])
        rows, sizes = torch.unique_consecutive(tiles, dim=1, return_counts=True)
        start = 0
        for (row, column), size in zip(rows.t().tolist(), sizes.tolist(), strict=True):
            top, left = row * self.tile, column * self.tile
            box = (top, left, min(top + self.tile, height), min(left + self.tile, width))
            pieces = -(-size // LARGE)
            for i in range(pieces):
                first, last = start + i * size // pieces, start + (i + 1) * size // pieces
                yield ImpulseBatch(first, last, box)
            start += size

    def impulses(self, batch: ImpulseBatch, like: Tensor) -> Value:
        """A 1 at each position of the batch, one image each: [n, ...] of like's dtype, device."""
        n = batch.stop - batch.start
        some = slice(batch.start, batch.stop)
        if not self.spatial:
            value = like.new_zeros(n, *self.shape)
            value.view(n, -1)[torch.arange(n), self.place[some]] = 1
            return value
        top, left, bottom, right = batch.box
        shape = (n, self.shape[0], bottom - top, right - left)
        value = torch.empty(
            shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
        ).zero_()
        value[torch.arange(n), self.c[some], self.y[some] - top, self.x[some] - left] = 1
        return Patch(value, top, left, (self.shape[1], self.shape[2]))

    def gather(self, value: Value) -> tuple[Tensor | None, Tensor]:
        """(numbers of the positions in the value's box or None for all, their values [n, ...])."""
        if not isinstance(value, Patch):
            flat = value.movedim(1, -1) if self.spatial else value
            return None, flat.reshape(len(value), -1).index_select(1, self.place.to(value.device))
        top, left, bottom, right = value.box
        inside = (self.y >= top) & (self.y < bottom) & (self.x >= left) & (self.x < right)
        which = inside.nonzero().flatten()
        place = (self.y[which] - top) * (right - left) + self.x[which] - left
        place = place * self.shape[0] + self.c[which]
        flat = value.value.movedim(1, -1).reshape(len(value.value), -1)
        found = flat.index_select(1, place.to(flat.device))
        return (None if len(which) == self.count else which), found


def tile_side(count: int, height: int, width: int) -> int:
    """The smallest power of two for which tiles hold SMALL positions on average.

    >>> tile_side(3072, 32, 32), tile_side(3072, 4, 4), tile_side(10, 32, 32)
    (4, 1, 32)
    """
    side = 1
    while side < max(height, width) and count < SMALL * -(-height // side) * -(-width // side):
        side *= 2
    return side
