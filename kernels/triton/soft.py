"""What SNL and AutoReP train: the soft ReLU, and the masked polynomial's backward with indicator.

z = x + residual throughout, without trials. A sum over the batch for each unit comes in the two
stages of common.py: a program adds up its items and writes a slot, torch.sum adds the slots.

The one trial t = 0 still stands in every offset: for an n that is no multiple of 16 triton must
not learn that a unit's own number is aligned where the items are not, or it regroups the tile
through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastbcd.kernels.geometry import Geometry

from .common import (
    OPAQUE,
    as_bytes,
    channel_of,
    launch,
    load,
    load_kept,
    locate,
    mask_offsets,
    new_partials,
    plan,
    reduce_partials,
    reduce_slots,
    row,
    store_partial,
)


@triton.jit(do_not_specialize=OPAQUE)
def soft_forward_kernel(
    y_ptr, x_ptr, alpha_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner,
    CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr,
    X_SHARED: tl.constexpr, RESIDUAL_SHARED: tl.constexpr,
    ALL_TRIALS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = z where z > 0, else (1 - a) * z."""
    offs, _, first, last, t, _ = locate(n, batch, trials, chunk, ALL_TRIALS, BLOCK)
    valid = offs < n
    leak = 1 - load(alpha_ptr + row(t, 0, 1, n), offs, valid)
    for b in range(first, last):
        item = row(t, b, batch, n)
        z = load(x_ptr + item, offs, valid)
        if residual_ptr is not None:
            z += load(residual_ptr + item, offs, valid)
        tl.store(y_ptr + item + offs, tl.where(z > 0, z, leak * z), mask=valid)


@triton.jit(do_not_specialize=OPAQUE)
def soft_backward_kernel(
    dx_ptr, partials_ptr, grad_ptr, x_ptr, alpha_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner,
    CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr,
    X_SHARED: tl.constexpr, RESIDUAL_SHARED: tl.constexpr,
    ALL_TRIALS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx from grad, z and a; the partial sums of da on the way."""
    offs, slot, first, last, t, _ = locate(n, batch, trials, chunk, ALL_TRIALS, BLOCK)
    valid = offs < n
    leak = 1 - load(alpha_ptr + row(t, 0, 1, n), offs, valid)
    dalpha = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(first, last):
        item = row(t, b, batch, n)
        z = load(x_ptr + item, offs, valid)
        if residual_ptr is not None:
            z += load(residual_ptr + item, offs, valid)
        grad = load(grad_ptr + item, offs, valid)
        # dz = grad where z > 0, else grad * (1 - a)
        tl.store(dx_ptr + item + offs, tl.where(z > 0, grad, grad * leak), mask=valid)
        # da = sum of grad * relu(-z): a NaN passes
        dalpha += tl.where(z > 0, 0.0, grad * -z)
    store_partial(partials_ptr, 0, dalpha, slot, offs, valid, n, BLOCK)


@triton.jit(do_not_specialize=OPAQUE)
def indicator_backward_kernel(
    dx_ptr, partials_ptr, grad_ptr, x_ptr, mask_ptr, coef_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner,
    CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr,
    X_SHARED: tl.constexpr, RESIDUAL_SHARED: tl.constexpr,
    ALL_TRIALS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx from grad and z; the partial sums of dcoef and of the bits' gradient on the way."""
    offs, slot, first, last, t, _ = locate(n, batch, trials, chunk, ALL_TRIALS, BLOCK)
    valid = offs < n
    mask_offs = mask_offsets(offs, channels, inner, CHANNELS_LAST, MASK_LAST)
    kept = load_kept(mask_ptr, mask_offs, valid, t, n)
    c = channel_of(offs, channels, inner, CHANNELS_LAST)
    c0 = load(coef_ptr, c, valid)
    c1 = load(coef_ptr + channels, c, valid)
    c2 = load(coef_ptr + 2 * channels, c, valid)
    dc0 = tl.zeros([BLOCK], dtype=tl.float32)
    dc1 = tl.zeros([BLOCK], dtype=tl.float32)
    dc2 = tl.zeros([BLOCK], dtype=tl.float32)
    dmask = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(first, last):
        item = row(t, b, batch, n)
        z = load(x_ptr + item, offs, valid)
        if residual_ptr is not None:
            z += load(residual_ptr + item, offs, valid)
        grad = load(grad_ptr + item, offs, valid)
        # p = z and g = grad where the bit is 0, else 0: a kept ReLU adds nothing to dcoef
        p = tl.where(kept, 0.0, z)
        g = tl.where(kept, 0.0, grad)
        # dcoef[i] = sum of g * p**i
        dc0 += g
        dc1 += g * p
        dc2 += g * (p * p)
        # dm = sum of grad * (relu(z) - poly(z)), whatever the bit
        dmask += grad * (tl.where(z <= 0, 0.0, z) - ((c2 * z + c1) * z + c0))
        # dz = grad * (1[z > 0] where the bit is 1, else 2 * c2 * z + c1)
        dz = tl.where(kept, tl.where(z <= 0, 0.0, grad), grad * (2 * c2 * p + c1))
        tl.store(dx_ptr + item + offs, dz, mask=valid)
    store_partial(partials_ptr, 0, dc0, slot, offs, valid, n, BLOCK)
    store_partial(partials_ptr, 1, dc1, slot, offs, valid, n, BLOCK)
    store_partial(partials_ptr, 2, dc2, slot, offs, valid, n, BLOCK)
    store_partial(partials_ptr, 3, dmask, slot, offs, valid, n, BLOCK)


def soft_forward(
    y: Tensor, x: Tensor, alpha: Tensor, residual: Tensor | None, g: Geometry
) -> None:  # fmt: skip
    """Write y [B, n]; alpha [n] lies in x's memory order."""
    launch(soft_forward_kernel, plan(g, x.element_size()), g, y, x, alpha, residual)


def soft_backward(
    dx: Tensor,
    dalpha: Tensor,
    grad: Tensor,
    x: Tensor,
    alpha: Tensor,
    residual: Tensor | None,
    g: Geometry,
) -> None:
    """Write dx [B, n] and dalpha [n]."""
    p = plan(g, grad.element_size(), reduces=True)
    partials = new_partials(1, p, g, grad)
    launch(soft_backward_kernel, p, g, dx, partials, grad, x, alpha, residual)
    reduce_slots(partials[0], dalpha)


def indicator_backward(
    dx: Tensor,
    dcoef: Tensor,
    dmask: Tensor,
    grad: Tensor,
    x: Tensor,
    mask: Tensor,
    coef: Tensor,
    residual: Tensor | None,
    g: Geometry,
) -> None:
    """Write dx [B, n], dcoef [3, C] and dmask [n], the gradient of the bits."""
    p = plan(g, grad.element_size(), reduces=True)
    partials = new_partials(4, p, g, grad)
    tensors = (dx, partials, grad, x, as_bytes(mask), coef, residual)
    launch(indicator_backward_kernel, p, g, *tensors)
    reduce_partials(partials[:3], dcoef, g)
    reduce_slots(partials[3], dmask)
