"""The backward of a masked activation together with the first-order effect of each removal.

z = x + residual, without trials. dx and the sums over the batch are computed in one pass over grad
and x; the sums in the two stages of common.py.
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
    reduce_slots,
    row,
    store_partial,
)


@triton.jit(do_not_specialize=OPAQUE)
def saliency_backward_kernel(
    dx_ptr, partials_ptr, grad_ptr, x_ptr, mask_ptr, coef_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner,
    CHANNELS_LAST: tl.constexpr, MASK_LAST: tl.constexpr, BLOCK: tl.constexpr,
    ABSOLUTE: tl.constexpr,
):  # fmt: skip
    """dx from grad and z, and the partial sums of the effects of removals."""
    offs, slot, first, last, t, _ = locate(n, batch, trials, chunk, False, BLOCK)
    valid = offs < n
    mask_offs = mask_offsets(offs, channels, inner, CHANNELS_LAST, MASK_LAST)
    kept = load_kept(mask_ptr, mask_offs, valid, t, n)
    if coef_ptr is not None:
        c = channel_of(offs, channels, inner, CHANNELS_LAST)
        c0 = load(coef_ptr, c, valid)
        c1 = load(coef_ptr + channels, c, valid)
        c2 = load(coef_ptr + 2 * channels, c, valid)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(first, last):
        item = row(t, b, batch, n)
        z = load(x_ptr + item, offs, valid)
        if residual_ptr is not None:
            z += load(residual_ptr + item, offs, valid)
        grad = load(grad_ptr + item, offs, valid)
        # added = min(z, 0), or poly(z) - relu(z); other: dz where the bit is 0
        if coef_ptr is None:
            added = tl.where(z > 0, 0.0, z)
            other = grad
        else:
            added = ((c2 * z + c1) * z + c0) - tl.where(z <= 0, 0.0, z)
            other = grad * (2 * c2 * z + c1)
        effect = grad * added
        if ABSOLUTE:
            effect = tl.abs(effect)
        sums += effect
        # dz = grad * 1[z > 0] where the bit is 1
        dz = tl.where(kept, tl.where(z <= 0, 0.0, grad), other)
        tl.store(dx_ptr + item + offs, dz, mask=valid)
    store_partial(partials_ptr, 0, sums, slot, offs, valid, n, BLOCK)


def saliency_backward(
    dx: Tensor,
    sums: Tensor,
    grad: Tensor,
    x: Tensor,
    mask: Tensor,
    coef: Tensor | None,
    residual: Tensor | None,
    absolute: bool,
    g: Geometry,
) -> None:
    """Write dx [B, n] and sums [n]; coef is that of a masked polynomial."""
    p = plan(g, grad.element_size(), reduces=True)
    partials = new_partials(1, p, g, grad)
    tensors = (dx, partials, grad, x, as_bytes(mask), coef, residual)
    launch(saliency_backward_kernel, p, g, *tensors, ABSOLUTE=absolute)
    reduce_slots(partials[0], sums)
