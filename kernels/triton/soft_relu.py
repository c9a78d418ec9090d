"""The soft ReLU: y = z where z > 0, else (1 - a)*z, with z = x + residual and one a per unit."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastbcd.kernels.geometry import Geometry

from .common import (
    OPAQUE,
    launch,
    load,
    locate,
    new_partials,
    plan,
    reduce_slots,
    row,
    store_partial,
)


@triton.jit(do_not_specialize=OPAQUE)
def soft_relu_forward_kernel(
    y_ptr, x_ptr, alpha_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = z where z > 0, else (1 - a) * z."""
    offs, _, first, last, t, _ = locate(n, batch, trials, chunk, False, BLOCK)
    valid = offs < n
    leak = 1 - load(alpha_ptr + row(t, 0, 1, n), offs, valid)
    for b in range(first, last):
        item = row(t, b, batch, n)
        z = load(x_ptr + item, offs, valid)
        if residual_ptr is not None:
            z += load(residual_ptr + item, offs, valid)
        tl.store(y_ptr + item + offs, tl.where(z > 0, z, leak * z), mask=valid)


@triton.jit(do_not_specialize=OPAQUE)
def soft_relu_backward_kernel(
    dx_ptr, partials_ptr, grad_ptr, x_ptr, alpha_ptr, residual_ptr,
    n, batch, trials, chunk, channels, inner,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dx from grad, z and a, and the partial sums of da."""
    offs, slot, first, last, t, _ = locate(n, batch, trials, chunk, False, BLOCK)
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


def soft_relu_forward(
    y: Tensor, x: Tensor, alpha: Tensor, residual: Tensor | None, g: Geometry
) -> None:  # fmt: skip
    """Write y [B, n]; alpha [n] lies in x's memory order."""
    launch(soft_relu_forward_kernel, plan(g, x.element_size()), g, y, x, alpha, residual)


def soft_relu_backward(
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
    launch(soft_relu_backward_kernel, p, g, dx, partials, grad, x, alpha, residual)
    reduce_slots(partials[0], dalpha)
