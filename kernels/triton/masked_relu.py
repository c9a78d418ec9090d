"""The masked ReLU: y = relu(z) where the bit is 1, else z, with z = x*scale + shift + residual."""

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
def masked_relu_forward_kernel(
    y_ptr, x_ptr, mask_ptr, scale_ptr, shift_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner,
    CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr,
    X_SHARED: tl.constexpr, RESIDUAL_SHARED: tl.constexpr,
    ALL_TRIALS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = relu(z) where the bit is 1, else z."""
    offs, _, first, last, t0, t1 = locate(n, batch, trials, chunk, ALL_TRIALS, BLOCK)
    valid = offs < n
    mask_offs = mask_offsets(offs, channels, inner, CHANNELS_LAST, MASK_LAST)
    bits = pack_masks(mask_ptr, mask_offs, valid, t0, t1, n, PACKED, BLOCK)
    if scale_ptr is not None:
        c = channel_of(offs, channels, inner, CHANNELS_LAST)
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
            # y = 0 where the bit is 1 and z <= 0, else z: a NaN passes
            y = tl.where(kept & (z <= 0), 0.0, z)
            tl.store(y_ptr + item + offs, y, mask=valid)


@triton.jit(do_not_specialize=OPAQUE)
def masked_relu_backward_kernel(
    dx_ptr, dresidual_ptr, partials_ptr, grad_ptr, y_ptr, mask_ptr, x_ptr, scale_ptr,
    n, batch, trials, chunk, channels, inner,
    CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr,
    X_SHARED: tl.constexpr, RESIDUAL_SHARED: tl.constexpr,
    ALL_TRIALS: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dz from grad, y and the bits; dx, dresidual and the partial sums from dz."""
    offs, slot, first, last, t0, t1 = locate(n, batch, trials, chunk, ALL_TRIALS, BLOCK)
    valid = offs < n
    mask_offs = mask_offsets(offs, channels, inner, CHANNELS_LAST, MASK_LAST)
    bits = pack_masks(mask_ptr, mask_offs, valid, t0, t1, n, PACKED, BLOCK)
    if scale_ptr is not None:
        scale = load(scale_ptr, channel_of(offs, channels, inner, CHANNELS_LAST), valid)
    if partials_ptr is not None:
        dscale = tl.zeros([BLOCK], dtype=tl.float32)
        dshift = tl.zeros([BLOCK], dtype=tl.float32)

    for b in range(first, last):
        shared_item = row(0, b, batch, n)
        if X_SHARED:
            dx_sum = tl.zeros([BLOCK], dtype=tl.float32)
            if partials_ptr is not None:
                x = load(x_ptr + shared_item, offs, valid)
        if RESIDUAL_SHARED:
            dresidual_sum = tl.zeros([BLOCK], dtype=tl.float32)
        for t in range(t0, t1):
            item = row(t, b, batch, n)
            kept = is_kept(bits, mask_ptr, mask_offs, valid, t, t0, n, PACKED)
            # dz = 0 where the bit is 1 and y <= 0, else grad: a NaN in y passes grad
            y = load(y_ptr + item, offs, valid)
            dz = tl.where(kept & (y <= 0), 0.0, load(grad_ptr + item, offs, valid))
            # dx = dz * scale, over shared x summed in the order of the trials
            dx = dz
            if scale_ptr is not None:
                dx = dz * scale
            if X_SHARED:
                dx_sum += dx
            else:
                tl.store(dx_ptr + item + offs, dx, mask=valid)
            # dresidual = dz, over a shared residual summed likewise
            if RESIDUAL_SHARED:
                dresidual_sum += dz
            elif dresidual_ptr is not None:
                tl.store(dresidual_ptr + item + offs, dz, mask=valid)
            # dscale = sum of dz * x, dshift = sum of dz
            if partials_ptr is not None:
                if not X_SHARED:
                    x = load(x_ptr + item, offs, valid)
                dscale += dz * x
                dshift += dz
        if X_SHARED:
            tl.store(dx_ptr + shared_item + offs, dx_sum, mask=valid)
        if RESIDUAL_SHARED:
            tl.store(dresidual_ptr + shared_item + offs, dresidual_sum, mask=valid)

    if partials_ptr is not None:
        store_partial(partials_ptr, 0, dscale, slot, offs, valid, n, BLOCK)
        store_partial(partials_ptr, 1, dshift, slot, offs, valid, n, BLOCK)


def masked_relu_forward(
    y: Tensor,
    x: Tensor,
    mask: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    g: Geometry,
) -> None:
    """Write y [T, B, n]. It may be x or residual itself, where that is not shared."""
    p = plan(g, x.element_size())
    launch(masked_relu_forward_kernel, p, g, y, x, as_bytes(mask), scale, shift, residual)


def masked_relu_backward(
    dx: Tensor,
    dresidual: Tensor | None,
    daffine: Tensor | None,
    grad: Tensor,
    y: Tensor,
    mask: Tensor,
    x: Tensor | None,
    scale: Tensor | None,
    g: Geometry,
) -> None:
    """Write dx, and dresidual and daffine [2, C] = d(scale, shift) where they are given."""
    p = plan(g, grad.element_size(), reduces=daffine is not None)
    partials = None if daffine is None else new_partials(2, p, g, grad)
    tensors = (dx, dresidual, partials, grad, y, as_bytes(mask), x, scale)
    launch(masked_relu_backward_kernel, p, g, *tensors)
    if partials is not None and daffine is not None:
        reduce_partials(partials, daffine, g)
