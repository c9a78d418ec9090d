"""The masked polynomial: y = relu(z) where the bit is 1, else c2*z² + c1*z + c0.

z = x*scale + shift + residual, coef [3, C] = (c0, c1, c2).
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
    is_kept,
    launch,
    load,
    locate,
    mask_offsets,
    new_partials,
    pack_masks,
    plan,
    reduce_partials,
    row,
    store_partial,
)


@triton.jit(do_not_specialize=OPAQUE)
def masked_poly_forward_kernel(
    y_ptr, x_ptr, mask_ptr, coef_ptr, scale_ptr, shift_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner,
    CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr,
    X_SHARED: tl.constexpr, RESIDUAL_SHARED: tl.constexpr,
    ALL_TRIALS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = relu(z) where the bit is 1, else the polynomial of z."""
    offs, _, first, last, t0, t1 = locate(n, batch, trials, chunk, ALL_TRIALS, BLOCK)
    valid = offs < n
    mask_offs = mask_offsets(offs, channels, inner, CHANNELS_LAST, MASK_LAST)
    bits = pack_masks(mask_ptr, mask_offs, valid, t0, t1, n, PACKED, BLOCK)
    c = channel_of(offs, channels, inner, CHANNELS_LAST)
    c0 = load(coef_ptr, c, valid)
    c1 = load(coef_ptr + channels, c, valid)
    c2 = load(coef_ptr + 2 * channels, c, valid)
    if scale_ptr is not None:
        scale = load(scale_ptr, c, valid)
        shift = load(shift_ptr, c, valid)

    for b in range(first, last):
        if X_SHARED:
            x = load(x_ptr + row(0, b, batch, n), offs, valid)
        if RESIDUAL_SHARED:
            residual = load(residual_ptr + row(0, b, batch, n), offs, valid)
        for t in range(t0, t1):
            item = row(t, b, batch, n)
            if not X_SHARED:
                x = load(x_ptr + item, offs, valid)
            # z = x * scale + shift + residual
            z = x
            if scale_ptr is not None:
                z = z * scale + shift
            if residual_ptr is not None:
                if not RESIDUAL_SHARED:
                    residual = load(residual_ptr + item, offs, valid)
                z += residual
            kept = is_kept(bits, mask_ptr, mask_offs, valid, t, t0, n, PACKED)
            # y = max(z, 0) where the bit is 1, else (c2 * z + c1) * z + c0: a NaN passes
            y = tl.where(kept, tl.where(z <= 0, 0.0, z), (c2 * z + c1) * z + c0)
            tl.store(y_ptr + item + offs, y, mask=valid)


@triton.jit(do_not_specialize=OPAQUE)
def masked_poly_backward_kernel(
    dx_ptr, dresidual_ptr, partials_ptr, grad_ptr, x_ptr, mask_ptr,
    coef_ptr, scale_ptr, shift_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner,
    CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr,
    X_SHARED: tl.constexpr, RESIDUAL_SHARED: tl.constexpr,
    ALL_TRIALS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z again, then dz; dx, dresidual and the partial sums of five parameters from dz."""
    offs, slot, first, last, t0, t1 = locate(n, batch, trials, chunk, ALL_TRIALS, BLOCK)
    valid = offs < n
    mask_offs = mask_offsets(offs, channels, inner, CHANNELS_LAST, MASK_LAST)
    bits = pack_masks(mask_ptr, mask_offs, valid, t0, t1, n, PACKED, BLOCK)
    c = channel_of(offs, channels, inner, CHANNELS_LAST)
    c1 = load(coef_ptr + channels, c, valid)
    c2 = load(coef_ptr + 2 * channels, c, valid)
    dc0 = tl.zeros([BLOCK], dtype=tl.float32)
    dc1 = tl.zeros([BLOCK], dtype=tl.float32)
    dc2 = tl.zeros([BLOCK], dtype=tl.float32)
    if scale_ptr is not None:
        scale = load(scale_ptr, c, valid)
        shift = load(shift_ptr, c, valid)
        dscale = tl.zeros([BLOCK], dtype=tl.float32)
        dshift = tl.zeros([BLOCK], dtype=tl.float32)

    for b in range(first, last):
        shared_item = row(0, b, batch, n)
        if X_SHARED:
            x = load(x_ptr + shared_item, offs, valid)
            dx_sum = tl.zeros([BLOCK], dtype=tl.float32)
        if RESIDUAL_SHARED:
            residual = load(residual_ptr + shared_item, offs, valid)
            dresidual_sum = tl.zeros([BLOCK], dtype=tl.float32)
        for t in range(t0, t1):
            item = row(t, b, batch, n)
            if not X_SHARED:
                x = load(x_ptr + item, offs, valid)
            # z = x * scale + shift + residual
            z = x
            if scale_ptr is not None:
                z = z * scale + shift
            if residual_ptr is not None:
                if not RESIDUAL_SHARED:
                    residual = load(residual_ptr + item, offs, valid)
                z += residual
            kept = is_kept(bits, mask_ptr, mask_offs, valid, t, t0, n, PACKED)
            grad = load(grad_ptr + item, offs, valid)
            # p = z and g = grad where the bit is 0, else 0: a kept ReLU adds nothing to dcoef
            p = tl.where(kept, 0.0, z)
            g = tl.where(kept, 0.0, grad)
            # dcoef[i] = sum of g * p**i
            dc0 += g
            dc1 += g * p
            dc2 += g * (p * p)
            # dz = grad * (1[z > 0] where the bit is 1, else 2 * c2 * z + c1)
            dz = tl.where(kept, tl.where(z <= 0, 0.0, grad), grad * (2 * c2 * p + c1))
            # dx = dz * scale, over shared x summed in the order of the trials
            dx = dz
            if scale_ptr is not None:
                dx = dz * scale
                # dscale = sum of dz * x, dshift = sum of dz
                dscale += dz * x
                dshift += dz
            if X_SHARED:
                dx_sum += dx
            else:
                tl.store(dx_ptr + item + offs, dx, mask=valid)
            # dresidual = dz, over a shared residual summed likewise
            if dresidual_ptr is not None:
                if RESIDUAL_SHARED:
                    dresidual_sum += dz
                else:
                    tl.store(dresidual_ptr + item + offs, dz, mask=valid)
        if X_SHARED:
            tl.store(dx_ptr + shared_item + offs, dx_sum, mask=valid)
        if RESIDUAL_SHARED and dresidual_ptr is not None:
            tl.store(dresidual_ptr + shared_item + offs, dresidual_sum, mask=valid)

    store_partial(partials_ptr, 0, dc0, slot, offs, valid, n, BLOCK)
    store_partial(partials_ptr, 1, dc1, slot, offs, valid, n, BLOCK)
    store_partial(partials_ptr, 2, dc2, slot, offs, valid, n, BLOCK)
    if scale_ptr is not None:
        store_partial(partials_ptr, 3, dscale, slot, offs, valid, n, BLOCK)
        store_partial(partials_ptr, 4, dshift, slot, offs, valid, n, BLOCK)


def masked_poly_forward(
    y: Tensor,
    x: Tensor,
    mask: Tensor,
    coef: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    g: Geometry,
) -> None:
    """Write y [T, B, n]. It may be x or residual itself, where that is not shared."""
    p = plan(g, x.element_size())
    launch(masked_poly_forward_kernel, p, g, y, x, as_bytes(mask), coef, scale, shift, residual)


def masked_poly_backward(
    dx: Tensor,
    dresidual: Tensor | None,
    dcoef: Tensor,
    daffine: Tensor | None,
    grad: Tensor,
    x: Tensor,
    mask: Tensor,
    coef: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    g: Geometry,
) -> None:
    """Write dx, dcoef [3, C], and dresidual and daffine [2, C] where they are given."""
    p = plan(g, grad.element_size(), reduces=True)
    partials = new_partials(3 if daffine is None else 5, p, g, grad)
    tensors = (dx, dresidual, partials, grad, x, as_bytes(mask), coef, scale, shift, residual)
    launch(masked_poly_backward_kernel, p, g, *tensors)
    reduce_partials(partials[:3], dcoef, g)
    if daffine is not None:
        reduce_partials(partials[3:], daffine, g)
