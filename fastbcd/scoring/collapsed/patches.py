"""Patches: images that are zero outside a box, and the linear operations that keep them small.

A unit impulse at one neuron reaches 3×3 positions after a 3×3 convolution, 5×5 after the next.
Only the box that it can have reached is stored and convolved:

    ┌──────────────┐
    │ 0    ┌────┐  │      value [n, C, h, w] lies at rows top .. top+h-1 and
    │      │ v  │  │      columns left .. left+w-1 of images [n, C, H, W]
    │      └────┘  │
    └──────────────┘
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fastbcd.scoring.program import Convolution

Box = tuple[int, int, int, int]  # top, left, bottom, right, the last two exclusive


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
    """The value as one tensor, with the zeros outside its box.

    >>> whole(Patch(torch.ones(1, 1, 1, 1), 0, 1, (2, 2)))[0, 0]
    tensor([[0., 1.],
            [0., 0.]])
    """
    return value.within((0, 0, *value.size)) if isinstance(value, Patch) else value


def convolve(x: Value, conv: Convolution) -> Value:
    """conv2d without its bias, on the box and its surroundings only."""
    if not isinstance(x, Patch) or x.box == (0, 0, *x.size):
        y = conv._replace(bias=None)(stored(x))
        return Patch(y, 0, 0, (y.shape[2], y.shape[3]))
    start, stop, corner, size = [], [], [], []
    for d, stride in enumerate(conv.stride):
        reach = conv.dilation[d] * (conv.weight.shape[2 + d] - 1)
        if isinstance(conv.padding, str):  # "same" or "valid"
            both = reach if conv.padding == "same" else 0
            before = reach // 2 if conv.padding == "same" else 0
        else:
            before, both = conv.padding[d], 2 * conv.padding[d]
        length = (x.size[d] + both - reach - 1) // stride + 1
        # Output o reads input positions o*stride - before ... + reach.
        first = max(0, math.ceil((x.box[d] + before - reach) / stride))
        last = (x.box[2 + d] - 1 + before) // stride
        # Strides can step over the box: one position is left, of zeros.
        first, last = min(first, length - 1), min(max(first, last), length - 1)
        start.append(first * stride - before)
        stop.append(last * stride - before + reach + 1)
        corner.append(first)
        size.append(length)
    seen = x.within((start[0], start[1], stop[0], stop[1]))
    y = conv._replace(bias=None, padding=(0, 0))(seen)
    return Patch(y, corner[0], corner[1], (size[0], size[1]))


def around(a: Box, b: Box) -> Box:
    """The smallest box that holds both."""
    return min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


def add(x: Value, y: Value) -> Value:
    """x + y, in the smallest box around both."""
    if isinstance(x, Patch) and isinstance(y, Patch) and x.size == y.size:
        box = around(x.box, y.box)
        return Patch(x.within(box) + y.within(box), box[0], box[1], x.size)
    return whole(x) + whole(y)


def subsample(x: Patch, rows: int, columns: int) -> Patch:
    """x[:, :, ::rows, ::columns]."""
    top, left = math.ceil(x.top / rows), math.ceil(x.left / columns)
    value = x.value[:, :, top * rows - x.top :: rows, left * columns - x.left :: columns]
    size = (math.ceil(x.size[0] / rows), math.ceil(x.size[1] / columns))
    if 0 in value.shape:  # nothing of the box is left: one position, of zeros
        top, left = min(top, size[0] - 1), min(left, size[1] - 1)
        value = x.value.new_zeros(*x.value.shape[:2], 1, 1)
    return Patch(value, top, left, size)


def mean(x: Patch, keepdim: bool) -> Tensor:
    """The mean over all H·W positions, [n, C] or [n, C, 1, 1]."""
    return x.value.sum((2, 3), keepdim=keepdim) / (x.size[0] * x.size[1])
