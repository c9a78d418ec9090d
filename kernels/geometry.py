"""How tensors are passed to a kernel: dense memory in one of two item orders.

A kernel sees flat arrays and a `Geometry`, never shapes and strides:

    x, residual  [T or 1, B, n]      y, grad  [T, B, n]      mask  [T, n] bytes      n = C * inner

The n elements of an item lie in x's own memory order, which is either (C, *spatial) or, as in
torch.channels_last, (*spatial, C). The mask may lie in the other order: it is small, and a
kernel reads it once for many batch items.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the ops calculate on tensors of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def is_shared(t: Tensor, mask: Tensor, trials: bool) -> bool:
    """True if t [B, *S] is used by all trials of mask [T, *S]."""
    return trials and t.ndim == mask.ndim


def are_shared(mask: Tensor, trials: bool, *tensors: Tensor | None) -> list[bool]:
    """`is_shared` for each tensor; False for None."""
    if not trials:
        return [False] * len(tensors)
    return [t is not None and t.ndim == mask.ndim for t in tensors]


class Geometry(NamedTuple):
    """One kernel call. Element i of an item has channel i % C if channels_last, else i // inner."""

    trials: int  # T; 1 without trials
    batch: int  # B
    channels: int  # C
    inner: int  # elements per channel: the product of the spatial sizes
    channels_last: bool  # an item lies as (*spatial, C), else as (C, *spatial)
    mask_last: bool  # a mask lies as (*spatial, C); if both do, it is read linearly
    x_shared: bool  # x is [1, B, n]: read once for all trials
    residual_shared: bool  # residual is [1, B, n]


def item_order(t: Tensor, channel: int) -> bool | None:
    """False: dense as (C, *spatial). True: dense as (*spatial, C). None: not dense.

    `channel` is the position of C among t's dimensions.
    """
    if t.is_contiguous():
        return False
    expected = 1
    for d in (channel, *range(t.ndim - 1, channel, -1), *range(channel - 1, -1, -1)):
        if t.shape[d] != 1 and t.stride(d) != expected:
            return None
        expected *= t.shape[d]
    return True


def dense(t: Tensor, channel: int, last: bool | None = None) -> Tensor:
    """t itself if it is dense (in the order `last`, where that is given), else a dense copy."""
    if not last and t.is_contiguous():
        return t
    if in_order(t, channel, last):
        return t
    if last is None:
        last = t.ndim > channel + 1 and t.stride(channel) == 1
    if last:
        return t.movedim(channel, -1).contiguous().movedim(-1, channel)
    return t.contiguous()


def dense_together(
    unit: Tensor, trials: bool, *tensors: Tensor | None
) -> tuple[Any, ...]:
    """A mask and tensors [B, *S] or [T, B, *S] as dense memory, in the item order of the first.

    A mask of numbers gets that order too; one of bits is small and may keep the other.
    """
    order: bool | None = None
    laid_out = []
    for t in tensors:
        if t is not None:
            t = dense(t, t.ndim - unit.ndim + trials, order)
            if order is None:
                order = not t.is_contiguous()
        laid_out.append(t)
    if not unit.is_floating_point():
        order = None
    return dense(unit, int(trials), order), *laid_out


def in_order(t: Tensor, channel: int, last: bool | None) -> bool:
    """Is t dense (in the order `last`, where that is given)?"""
    order = item_order(t, channel)
    return order is not None and (
        last is None or order == last or orders_coincide(t, channel)
    )


def orders_coincide(t: Tensor, channel: int) -> bool:
    """Both orders are the same memory: one channel, or one element per channel."""
    return t.shape[channel] == 1 or t.shape[channel + 1 :].numel() == 1


def new_output(x: Tensor, mask: Tensor, trials: bool) -> Tensor:
    """An empty y for dense x: x's shape and strides, with T in front where x is shared."""
    if not is_shared(x, mask, trials):
        return torch.empty_like(x)
    return x.new_empty_strided(
        (mask.shape[0], *x.shape), (max(x.numel(), 1), *x.stride()), dtype=x.dtype
    )


def new_gradient(grad: Tensor, shared: bool) -> Tensor:
    """An empty gradient in the memory order of the dense grad, without T for a shared tensor."""
    if not shared:
        return torch.empty_like(grad)
    return grad.new_empty_strided(grad.shape[1:], grad.stride()[1:])


def geometry(
    x: Tensor,
    mask: Tensor,
    trials: bool = False,
    x_shared: bool = False,
    residual_shared: bool = False,
) -> Geometry:
    """The geometry of a call with dense x [.., B, C, *spatial] and dense mask [.., C, *spatial]."""
    # Both are dense, so what is not contiguous is in the other order.
    orders = not x.is_contiguous(), not mask.is_contiguous()
    return _geometry(x.shape, mask.shape, trials, *orders, x_shared, residual_shared)


@lru_cache(maxsize=4096)
def _geometry(
    x: tuple[int, ...], mask: tuple[int, ...], trials: bool, x_last: bool, mask_last: bool,
    *shared: bool,
) -> Geometry:  # fmt: skip
    """The same from the shapes; a net has few of them and calls them often."""
    batch, channels, *spatial = x[-(len(mask) + (not trials)) :]
    inner = math.prod(spatial)
    if channels == 1 or inner == 1:  # both orders are the same memory
        mask_last = x_last
    return Geometry(
        mask[0] if trials else 1, batch, channels, inner, x_last, mask_last, *shared
    )
