"""soft_relu and indicator_poly: the activations that SNL and AutoReP train.

    soft_relu       y = a*relu(z) + (1 - a)*z             a real number per unit instead of a bit
    indicator_poly  y = masked_poly(z), the bit of a unit decided by a real number `aux`

Both take z = x + residual. The backward computes dx and the sums over the batch in one pass, in a
fixed order of summation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fastbcd.kernels.geometry import compute_dtype, dense, dense_together, item_order
from fastbcd.ops.arguments import check_arguments, check_items, check_small
from fastbcd.ops.calls import KernelCall, backward_call
from fastbcd.ops.masked import masked_call
from fastbcd.ops.registry import define


def soft_relu(x: Tensor, alpha: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """a*relu(z) + (1 - a)*z with z = x + residual: a ReLU for a = 1, the identity for a = 0.

    Args:
        x: [B, *S].
        alpha: [*S] floating-point, one number per unit; not copied if in x's memory order.
        residual: added before the activation, shaped like x.

    Equivalent to: torch.where(z > 0, z, (1 - alpha) * z)

    >>> soft_relu(torch.tensor([[-2.0, -2.0, 3.0]]), torch.tensor([1.0, 0.25, 0.5]))
    tensor([[-0.0000, -1.5000,  3.0000]])
    """
    check_small("alpha", alpha, x, tuple(x.shape[1:]))
    check_items(x, alpha, residual)
    return _soft_relu(x, alpha.to(compute_dtype(x.dtype)), residual)


def indicator_poly(
    x: Tensor, mask: Tensor, coef: Tensor, aux: Tensor, *, residual: Tensor | None = None
) -> Tensor:
    """`masked_poly`, with a gradient for the numbers that decide its bits.

    Args:
        x: [B, *S].
        mask: [*S] bool or uint8: the current bits. The caller derives them from aux.
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
    check_small("aux", aux, x, tuple(x.shape[1:]))
    check_small("coef", coef, x, (3, x.shape[1]))
    small = compute_dtype(x.dtype)
    return _indicator_poly(x, mask, coef.to(small), aux.to(small), residual)


def _soft_call(x: Tensor, alpha: Tensor, residual: Any) -> KernelCall:
    _, x, residual = dense_together(alpha, False, x, residual)
    alpha = _beside(alpha, x)
    return KernelCall([torch.empty_like(x)], (x, alpha, residual), (x, alpha))


def _soft_backward_call(grad: Tensor, x: Tensor, alpha: Tensor, residual: Any) -> KernelCall:
    _, x, residual, grad = dense_together(alpha, False, x, residual, grad)
    alpha = _beside(alpha, x)
    outputs = [torch.empty_like(x), torch.empty_like(alpha)]
    return KernelCall(outputs, (grad, x, alpha, residual), (x, alpha))


def _beside(alpha: Tensor, x: Tensor) -> Tensor:
    """alpha in the item order of the dense x, where a mask may lie in the other."""
    return dense(alpha, 0, item_order(x, 1))


def _indicator_call(x, mask, coef, aux, residual) -> KernelCall:
    return masked_call(x, mask, coef, None, None, residual, False)  # no scale, no shift, no trials


def _indicator_backward_call(grad, x, mask, coef, residual) -> KernelCall:
    dcoef = coef.new_empty(coef.shape)
    return backward_call(grad, x, mask, coef, residual, more=[dcoef])


_soft_relu = define("soft_relu(Tensor x, Tensor alpha, Tensor? residual) -> Tensor", _soft_call)
_soft_relu_backward = define(
    "soft_relu_backward(Tensor grad, Tensor x, Tensor alpha, Tensor? residual) "
    "-> (Tensor dx, Tensor dalpha)",
    _soft_backward_call,
)
_indicator_poly = define(
    "indicator_poly(Tensor x, Tensor mask, Tensor coef, Tensor aux, Tensor? residual) -> Tensor",
    _indicator_call,
)
_indicator_poly_backward = define(
    "indicator_poly_backward(Tensor grad, Tensor x, Tensor mask, Tensor coef, Tensor? residual) "
    "-> (Tensor dx, Tensor dcoef, Tensor dmask)",
    _indicator_backward_call,
)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


# dz is the gradient of x and of the residual: one tensor for both.


def _soft_gradients(ctx, grad):
    dx, dalpha = _soft_relu_backward.derivative(grad, *ctx.saved_tensors)
    return dx, dalpha, dx if ctx.needs_input_grad[2] else None


def _indicator_gradients(ctx, grad):
    x, mask, coef, aux, residual = ctx.saved_tensors
    dx, dcoef, dmask = _indicator_poly_backward.derivative(grad, x, mask, coef, residual)
    daux = softplus(aux) * dmask
    return dx, None, dcoef, daux, dx if ctx.needs_input_grad[4] else None


_soft_relu.differentiate(_setup, _soft_gradients)
_indicator_poly.differentiate(_setup, _indicator_gradients)
