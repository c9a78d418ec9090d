"""The arithmetic on pixels: normalising, and crops with flips."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Values = tuple[float, ...]


def stats(
    mean: Iterable[float] | None, std: Iterable[float] | None, shape: Sequence[int]
) -> tuple[Values, Values]:
    """A mean and std for inputs of this shape, without N: 0 and 1 where none is given."""
    channels = shape[0] if len(shape) > 1 else 1
    found = []
    for name, given, default in (("mean", mean, 0.0), ("std", std, 1.0)):
        try:
            values = (default,) * channels if given is None else tuple(map(float, given))
        except (TypeError, ValueError):
            raise TypeError(f"{name}={given!r}; it must have a number for each channel") from None
        if len(values) != channels:
            raise ValueError(f"{name} has {len(values)} values for {channels} channels")
        if not np.isfinite(values).all() or (name == "std" and min(values) <= 0):
            raise ValueError(f"{name} is {values}; it must be finite, and std above 0")
        found.append(values)
    return found[0], found[1]


def normalise(images: Tensor, mean: Values, std: Values, out: Tensor) -> Tensor:
    """(images/255 - mean)/std into `out`, in one pass; floats are not divided by 255."""
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
    mean: Values, std: Values, top: float, shape: tuple[int, ...], dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(x/top - mean)/std = x·scale + shift: scale and shift, [C,...].

    Spread over the shape, because then the arithmetic is vectorised: 2.5 times as fast on a CPU.
    """
    scale = [1 / (top * s) for s in std]
    shift = [-m / s for m, s in zip(mean, std, strict=True)]
    both = torch.tensor([scale, shift], dtype=torch.float64).to(device, dtype)
    scales, shifts = both.view(2, -1, *[1] * (len(shape) - 1)).expand(2, *shape).contiguous()
    return scales, shifts


def crop(images: Tensor, views: Tensor, padding: int) -> Tensor:
    """Each image [B,C,H,W] padded with zeros, cropped to its size and flipped as its view says."""
    batch, channels, height, width = images.shape
    index = _crop_index(views, height, width, padding)
    x = F.pad(images, (padding,) * 4).flatten(2)
    x = x.gather(2, index.unsqueeze(1).expand(-1, channels, -1))
    return x.view(batch, channels, height, width)


def _crop_index(views: Tensor, height: int, width: int, padding: int) -> Tensor:
    """Where in the padded, flattened image each pixel of a view comes from: [B, height·width]."""
    side, stride = 2 * padding + 1, width + 2 * padding
    top, left, flip = views // 2 // side, views // 2 % side, views % 2 == 1
    column = torch.arange(width, device=views.device)
    column = left[:, None] + torch.where(flip[:, None], width - 1 - column, column)
    row = (top[:, None] + torch.arange(height, device=views.device)) * stride
    return (row[:, :, None] + column[:, None, :]).flatten(1)
