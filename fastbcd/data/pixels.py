"""The arithmetic on pixels: normalising, and crops with flips."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Values = tuple[float, ...]


def stats(mean: Any, std: Any, shape: Sequence[int]) -> tuple[Values, Values]:
    """A mean and std for inputs of this shape, without N: 0 and 1 where none is given."""
    channels = shape[0] if len(shape) > 1 else 1
    means = _per_channel("mean", mean, [0.0] * channels)
    stds = _per_channel("std", std, [1.0] * channels)
    if min(stds) <= 0:
        raise ValueError(f"std is {stds}; it must be above 0")
    return means, stds


def _per_channel(name: str, values: Any, default: list[float]) -> Values:
    if values is None:
        return tuple(default)
    try:
        numbers = tuple(np.atleast_1d(values).astype(float).tolist())
    except (TypeError, ValueError):
        raise TypeError(f"{name}={values!r}; it must have a number for each channel") from None
    if len(numbers) != len(default):
        raise ValueError(f"{name} has {len(numbers)} values for {len(default)} channels")
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} is {numbers}; it must be finite")
    return numbers


def normalise(
    images: Tensor,
    mean: Values,
    std: Values,
    memory_format: torch.memory_format = torch.contiguous_format,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(images/255 - mean)/std in one pass; floats are not divided by 255.

    memory_format: of images [B,C,H,W]; others are contiguous.
    """
    if images.ndim != 4:
        memory_format = torch.contiguous_format
    out = torch.empty_like(images, dtype=dtype, memory_format=memory_format)
    top = 1.0 if images.is_floating_point() else 255.0
    if top == 1.0 and not any(mean) and set(std) == {1.0}:
        return out.copy_(images)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    scale, shift = _affine(mean, std, top, tuple(images.shape[1:]), wide, images.device)
    if out.is_contiguous():
        return torch.addcmul(shift, images, scale, out=out)
    # Arithmetic in the images' own order and then a copy is faster than across the two orders.
    return out.copy_(torch.addcmul(shift, images, scale))


@lru_cache(maxsize=64)
def _affine(
    mean: Values,
    std: Values,
    top: float,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """(x/top - mean)/std = x·scale + shift: scale and shift, [C,...].

    Spread over the shape, because then the arithmetic is vectorised: 2.5 times as fast on a CPU.
    """
    scale = [1 / (top * s) for s in std]
    shift = [-m / s for m, s in zip(mean, std, strict=True)]
    column = torch.tensor([scale, shift], dtype=torch.float64).to(device, dtype)
    spread = column.view(2, -1, *[1] * (len(shape) - 1)).expand(2, *shape).contiguous()
    return spread[0], spread[1]


def crop(images: Tensor, views: Tensor, padding: int) -> Tensor:
    """Each image [B,C,H,W] padded with zeros, cropped to its size and flipped as its view says."""
    index = _crop_index(views, images.shape[2], images.shape[3], padding)
    padded = F.pad(images, (padding,) * 4).flatten(2)
    index = index.unsqueeze(1).expand(-1, images.shape[1], -1)
    return padded.gather(2, index).view(images.shape)


def _crop_index(views: Tensor, height: int, width: int, padding: int) -> Tensor:
    """Where in the padded, flattened image each pixel of a view comes from: [B, height·width]."""
    side = 2 * padding + 1
    top = views // 2 // side
    left = views // 2 % side
    flip = views % 2 == 1
    column = torch.arange(width, device=views.device)
    column = left[:, None] + torch.where(flip[:, None], width - 1 - column, column)
    row = top[:, None] + torch.arange(height, device=views.device)
    return (row[:, :, None] * (width + 2 * padding) + column[:, None, :]).flatten(1)
