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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbcd.scoring.program import Convolution

Box = tuple[int, int, int, int]  # top, left, bottom, right, the last two exclusive


class Patch(NamedTuple):
    """The box of n images of size (H, W) outside of which they are zero."""

    value: Tensor  # [n, C, h, w]
    top: int
    left: int
    size: tuple[int, int]

    @property
    def box(self) -> Box:
        height, width = self.value.shape[2:]
        return self.top, self.left, self.top + height, self.left + width

    def is_whole(self) -> bool:
        return self.box == (0, 0, *self.size)

    def within(self, box: Box) -> Tensor:
        """The numbers in another box: cropped, or extended with zeros."""
        if box == self.box:
            return self.value
        top, left, bottom, right = self.box
        edges = (left - box[1], box[3] - right, top - box[0], box[2] - bottom)  # to add, or to cut
        if bottom <= box[0] or box[2] <= top or right <= box[1] or box[3] <= left:
            return self.value.new_zeros(*self.value.shape[:2], box[2] - box[0], box[3] - box[1])
        return F.pad(self.value, edges)

    def whole(self) -> Tensor:
        """[n, C, H, W]."""
        return self.within((0, 0, *self.size))


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
    return value.whole() if isinstance(value, Patch) else value


def convolve(x: Value, conv: Convolution) -> Value:
    """conv2d without its bias, on the box and its surroundings only."""
    x = x if isinstance(x, Patch) else Patch(x, 0, 0, (x.shape[2], x.shape[3]))
    weight, stride, dilation = conv.weight, conv.stride, conv.dilation
    if x.is_whole():
        y = F.conv2d(x.value, weight, None, stride, conv.padding, dilation, conv.groups)
        return Patch(y, 0, 0, (y.shape[2], y.shape[3]))
    out, need, size = [], [], []
    for d in (0, 1):
        reach = dilation[d] * (weight.shape[2 + d] - 1)
        before, after = _padding(conv.padding, d, reach)
        length = (x.size[d] + before + after - reach - 1) // stride[d] + 1
        # Output o reads input positions o*stride - before ... + reach.
        first = max(0, math.ceil((x.box[d] + before - reach) / stride[d]))
        last = min(length - 1, (x.box[2 + d] - 1 + before) // stride[d])
        last = max(last, first)  # strides can step over the box: keep one position, of zeros
        first = min(first, length - 1)
        last = min(last, length - 1)
        out.append(first)
        size.append(length)
        need.append((first * stride[d] - before, last * stride[d] - before + reach + 1))
    seen = x.within((need[0][0], need[1][0], need[0][1], need[1][1]))
    y = F.conv2d(seen, weight, None, stride, 0, dilation, conv.groups)
    return Patch(y, out[0], out[1], (size[0], size[1]))


def _padding(padding: Any, d: int, reach: int) -> tuple[int, int]:
    if padding == "valid":
        return 0, 0
    if padding == "same":
        return reach // 2, reach - reach // 2
    return padding[d], padding[d]


def around(a: Box, b: Box) -> Box:
    """The smallest box that holds both."""
    return min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


def add(x: Value, y: Value) -> Value:
    """x + y, in the smallest box around both."""
    if isinstance(x, Patch) and isinstance(y, Patch) and x.size == y.size:
        box = around(x.box, y.box)
        return Patch(x.within(box) + y.within(box), box[0], box[1], x.size)
    return whole(x) + whole(y)


def join(parts: list[Patch]) -> Patch:
    """Patches of equal image size side by side along the channels."""
    box = parts[0].box
    for part in parts[1:]:
        box = around(box, part.box)
    return Patch(torch.cat([p.within(box) for p in parts], 1), box[0], box[1], parts[0].size)


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
