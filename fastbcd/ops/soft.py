"""The activations that starting points train: SNL's soft ReLU and AutoReP's indicator.

    soft_relu       y = a*relu(z) + (1 - a)*z             a real number a unit in place of the bit
    indicator_poly  y = masked_poly(z), the bit of a unit decided by a number `aux`

Both take z = x + residual. Their operators are built like those of `ops.py`, which lists them
with the masked activations: one node each to autograd and torch.compile, dense memory, a C++
or a Triton kernel, or `reference.py`. The backward gives dx and the sum over the batch that a
unit's own number needs in one pass, in a fixed order of summation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fastbcd import kernels
from fastbcd.kernels.geometry import (
    Geometry,
    compute_dtype,
    dense,
    geometry,
    item_order,
)
from fastbcd.ops import reference
from fastbcd.ops.arguments import check_arguments, check_channelwise, check_soft


def soft_relu(x: Tensor, alpha: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """a*relu(z) + (1 - a)*z with z = x + residual: a ReLU for a = 1, the identity for a = 0.

    Args:
        x: [B, *S].
        alpha: [*S] floating-point, one number a unit; in x's memory order nothing is copied.
        residual: added before the activation, shaped like x.

    Equivalent to: torch.where(z > 0, z, (1 - alpha) * z)

    >>> soft_relu(torch.tensor([[-2.0, -2.0, 3.0]]), torch.tensor([1.0, 0.25, 0.5]))
    tensor([[-0.0000, -1.5000,  3.0000]])
    """
    check_soft(x, alpha, residual)
    alpha = alpha.to(compute_dtype(x.dtype))
    return torch.ops.fastbcd.soft_relu.default(x, alpha, residual)


def indicator_poly(
    x: Tensor, mask: Tensor, coef: Tensor, aux: Tensor, *, residual: Tensor | None = None
) -> Tensor:
    """`masked_poly`, with a gradient for the numbers that decide its bits.

    Args:
        x: [B, *S].
        mask: [*S] bool or uint8: the bits as they stand. How they follow aux is the caller's.
        coef: [3, C] as in `masked_poly`.
        aux: [*S] floating-point. Its gradient is that of the bit, straight through:
            softplus(aux) * sum over the batch of grad * (relu(z) - poly(z))
        residual: added before the activation, shaped like x.

    Equivalent to: masked_poly(x, mask, coef, residual=residual)

    >>> aux = torch.zeros(2, requires_grad=True)
    >>> y = indicator_poly(torch.tensor([[-3.0, 2.0]]), aux > -1, torch.zeros(3, 2), aux)
    >>> y.sum().backward()
    >>> y.tolist(), aux.grad
    ([[0.0, 2.0]], tensor([0.0000, 1.3863]))
    """
    check_arguments(x, mask, None, None, residual, False)
    check_soft(x, aux, residual, "aux")
    check_channelwise("coef", coef, x, (3, x.shape[1]))
    small = compute_dtype(x.dtype)
    return torch.ops.fastbcd.indicator_poly.default(
        x, mask, coef.to(small), aux.to(small), residual
    )


# ------------------------------------------------------------------------------- operators

_library = torch.library.Library("fastbcd", "FRAGMENT")
_library.define("soft_relu(Tensor x, Tensor alpha, Tensor? residual) -> Tensor")
_library.define(
    "soft_relu_backward(Tensor grad, Tensor x, Tensor alpha, Tensor? residual) "
    "-> (Tensor dx, Tensor dalpha)"
)
_library.define(
    "indicator_poly(Tensor x, Tensor mask, Tensor coef, Tensor aux, Tensor? residual) -> Tensor"
)
_library.define(
    "indicator_poly_backward(Tensor grad, Tensor x, Tensor mask, Tensor coef, Tensor aux, "
    "Tensor? residual) -> (Tensor dx, Tensor dcoef, Tensor daux)"
)


def _lay_out(x: Tensor, units: Tensor, residual: Any, grad: Any = None) -> tuple[Any, ...]:
    """x, units [*S], residual, grad as dense memory in one item order, x's own."""
    x = dense(x, 1)
    last = item_order(x, 1)
    rest = (None if t is None else dense(t, 1, last) for t in (residual, grad))
    return x, dense(units, 0, last), *rest


def _geometry(x: Tensor, units: Tensor) -> Geometry:
    return geometry(x, units, None, False)


def _soft_forward(x, alpha, residual) -> Tensor:
    x, alpha, residual, _ = _lay_out(x, alpha, residual)
    kernel = kernels.choose(x)
    y = torch.empty_like(x)
    if kernel is None:
        y.copy_(reference.soft_relu(x, alpha, residual))
    elif y.numel():
        kernel.soft_forward(y, x, alpha, residual, _geometry(x, alpha))
    return y


def _soft_backward(grad, x, alpha, residual) -> tuple[Tensor, Tensor]:
    x, alpha, residual, grad = _lay_out(x, alpha, residual, grad)
    kernel = kernels.choose(x)
    dx, dalpha = torch.empty_like(x), torch.zeros_like(alpha)
    if kernel is None:
        _copy((dx, dalpha), reference.soft_relu_backward(grad, x, alpha, residual))
    elif x.numel():
        kernel.soft_backward(dx, dalpha, grad, x, alpha, residual, _geometry(x, alpha))
    return dx, dalpha


def _indicator_forward(x, mask, coef, aux, residual) -> Tensor:
    x, aux, residual, _ = _lay_out(x, aux, residual)
    mask, kernel = dense(mask, 0), kernels.choose(x)
    y = torch.empty_like(x)
    if kernel is None:
        y.copy_(reference.masked_poly(x, mask, coef, None, None, residual))
    elif y.numel():
        g = geometry(x, mask, residual, False)
        kernel.poly_forward(y, x, mask, coef.contiguous(), None, None, residual, g)
    return y


def _indicator_backward(grad, x, mask, coef, aux, residual) -> tuple[Tensor, Tensor, Tensor]:
    x, aux, residual, grad = _lay_out(x, aux, residual, grad)
    mask, coef, kernel = dense(mask, 0), coef.contiguous(), kernels.choose(x)
    dx, dcoef, dmask = torch.empty_like(x), torch.zeros_like(coef), torch.zeros_like(aux)
    if kernel is None:
        found = reference.indicator_poly_backward(grad, x, mask, coef, aux, residual)
        _copy((dx, dcoef, dmask), found)
        return dx, dcoef, dmask
    if x.numel():
        g = geometry(x, mask, residual, False)
        kernel.indicator_backward(dx, dcoef, dmask, grad, x, mask, coef, residual, g)
    return dx, dcoef, softplus(aux).mul_(dmask)


def _copy(outputs: tuple, found: tuple) -> None:
    for out, value in zip(outputs, found, strict=True):
        out.copy_(value)


# What each operator returns, for shape inference.


def _forward_shape(x, *_) -> Tensor:
    return torch.empty_like(dense(x, 1))


def _soft_backward_shape(grad, x, alpha, residual) -> tuple[Tensor, ...]:
    x, alpha, *_ = _lay_out(x, alpha, None)
    return torch.empty_like(x), torch.empty_like(alpha)


def _indicator_backward_shape(grad, x, mask, coef, aux, residual) -> tuple[Tensor, ...]:
    x, aux, *_ = _lay_out(x, aux, None)
    return torch.empty_like(x), torch.empty_like(coef.contiguous()), torch.empty_like(aux)


for _name, _implementation, _fake in (
    ("soft_relu", _soft_forward, _forward_shape),
    ("soft_relu_backward", _soft_backward, _soft_backward_shape),
    ("indicator_poly", _indicator_forward, _forward_shape),
    ("indicator_poly_backward", _indicator_backward, _indicator_backward_shape),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastbcd::{_name}", _fake, lib=_library)


# -------------------------------------------------------------------------------- autograd
# dz goes to x and to the residual: one tensor serves both.


def _soft_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _soft_grads(ctx, grad):
    dx, dalpha = torch.ops.fastbcd.soft_relu_backward.default(grad, *ctx.saved_tensors)
    return dx, dalpha, dx if ctx.needs_input_grad[2] else None


def _indicator_grads(ctx, grad):
    dx, dcoef, daux = torch.ops.fastbcd.indicator_poly_backward.default(grad, *ctx.saved_tensors)
    return dx, None, dcoef, daux, dx if ctx.needs_input_grad[4] else None


for _name, _gradients in (("soft_relu", _soft_grads), ("indicator_poly", _indicator_grads)):
    torch.library.register_autograd(
        f"fastbcd::{_name}", _gradients, setup_context=_soft_setup, lib=_library
    )
