"""The backward of the masked polynomial with a gradient for its bits; z = x + residual.

The forward is that of masked_poly.py.
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
def indicator_poly_backward_kernel(
    dx_ptr, partials_ptr, grad_ptr, x_ptr, mask_ptr, coef_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner,
    CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx from grad and z, and the partial sums of dcoef and of the bits' gradient."""
    offs, slot, first, last, t, _ = locate(n, batch, trials, chunk, False, BLOCK)
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


def indicator_poly_backward(
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
    launch(indicator_poly_backward_kernel, p, g, *tensors)
    reduce_partials(partials[:3], dcoef, g)
    reduce_slots(partials[3], dmask)
