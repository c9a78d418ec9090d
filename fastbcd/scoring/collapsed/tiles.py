"""The kept units of a site, ordered and cut into groups that lie near each other.

Impulses of a group travel in one batch, so their boxes should overlap: a site [C, H, W] is cut
into tiles, and its units are taken tile by tile. Other sites have one group after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastbcd.scoring.collapsed.patches import Box, Patch, Value

SMALL, LARGE = 24, 64  # impulses in a batch: tiles grow until they hold SMALL, and split at LARGE


class Units:
    """positions: LongTensor[n], places in the flattened site; `order` sorts them by tile."""

    def __init__(self, shape: tuple[int, ...], positions: Tensor) -> None:
        self.shape, self.count = shape, len(positions)
        self.spatial = len(shape) == 3
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
        self._inside: dict[Box, tuple[Tensor, Tensor]] = {}

    def groups(self) -> Iterator[Group]:
        """All units in order, in groups of at most LARGE that share a tile."""
        if not self.spatial:
            for start in range(0, self.count, LARGE):
                yield Group(start, min(start + LARGE, self.count), (0, 0, 0, 0))
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
                yield Group(start + i * size // pieces, start + (i + 1) * size // pieces, box)
            start += size

    def impulses(self, group: Group, like: Tensor) -> Value:
        """A 1 at each unit of the group, one image a unit: [n, ...] of like's dtype and device."""
        n = group.stop - group.start
        units = slice(group.start, group.stop)
        if not self.spatial:
            value = like.new_zeros(n, *self.shape)
            value.view(n, -1)[torch.arange(n), self.place[units]] = 1
            return value
        top, left, bottom, right = group.box
        shape = (n, self.shape[0], bottom - top, right - left)
        value = torch.empty(
            shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
        ).zero_()
        value[torch.arange(n), self.c[units], self.y[units] - top, self.x[units] - left] = 1
        return Patch(value, top, left, (self.shape[1], self.shape[2]))

    def gather(self, value: Value) -> tuple[Tensor | None, Tensor]:
        """(numbers of the units in the value's box or None for all, their values [n, ...])."""
        if not isinstance(value, Patch):
            flat = value.movedim(1, -1) if self.spatial else value
            return None, flat.reshape(len(value), -1).index_select(1, self.place.to(value.device))
        which, place = self._in_box(value.box)
        flat = value.value.movedim(1, -1).reshape(len(value.value), -1)
        found = flat.index_select(1, place.to(flat.device))
        return (None if len(which) == self.count else which), found

    def _in_box(self, box: Box) -> tuple[Tensor, Tensor]:
        if box not in self._inside:
            top, left, bottom, right = box
            inside = (self.y >= top) & (self.y < bottom) & (self.x >= left) & (self.x < right)
            which = inside.nonzero().flatten()
            place = (self.y[which] - top) * (right - left) + self.x[which] - left
            self._inside[box] = which, place * self.shape[0] + self.c[which]
        return self._inside[box]


class Group(NamedTuple):
    """Units start .. stop-1 of a site, all inside a box."""

    start: int
    stop: int
    box: Box


def tile_side(count: int, height: int, width: int) -> int:
    """The smallest power of two for which tiles hold SMALL units on average.

    >>> tile_side(3072, 32, 32), tile_side(3072, 4, 4), tile_side(10, 32, 32)
    (4, 1, 32)
    """
    side = 1
    while side < max(height, width) and count < SMALL * -(-height // side) * -(-width // side):
        side *= 2
    return side
