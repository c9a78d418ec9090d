"""saliency: a masked activation whose backward also sums the effect of every removal.

Removing the ReLU of a kept unit adds min(z, 0) to its output (poly(z) - relu(z) at a polynomial
site), which changes the loss by grad * min(z, 0) to first order. Where z < 0 the output is 0 and
does not determine z, so the input (and the residual) is saved for the backward instead of the
output: the same memory, and nothing is computed twice. Returning a removed ReLU undoes its removal
and has the opposite effect, so that the sums are of all units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbcd.kernels.geometry import compute_dtype
from fastbcd.ops.calls import backward_call
from fastbcd.ops.masked import masked_poly, masked_relu
from fastbcd.ops.registry import define


def saliency(
    x: Tensor,
    mask: Tensor,
    anchor: Tensor,
    totals: Tensor,
    *,
    absolute: bool,
    coef: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`masked_relu`, or `masked_poly` with coef; its backward adds the effects to `totals`.

    Args:
        x: [B, *S]. mask: [*S]. coef: [3, C]. residual: shaped like x.
        anchor: any tensor that requires a gradient. It never gets one; it makes autograd run
            this backward even if nothing before the activation requires a gradient.
        totals: DoubleTensor[*S]; the backward adds the sum over the batch of grad * added, or of
            |grad * added| if absolute.

    >>> x, totals = torch.tensor([[-2.0, -3.0, 4.0]]), torch.zeros(3, dtype=torch.float64)
    >>> mask, anchor = torch.tensor([True, False, True]), torch.zeros((), requires_grad=True)
    >>> saliency(x, mask, anchor, totals, absolute=True).sum().backward()
    >>> totals
    tensor([2., 3., 0.], dtype=torch.float64)
    """
    small = None if coef is None else coef.detach().to(compute_dtype(x.dtype))
    return _Saliency.apply(anchor, x, residual, mask, small, totals, absolute)


class _Saliency(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor, x, residual, mask, coef, totals, absolute) -> Tensor:
        ctx.save_for_backward(x, residual, mask, coef)
        ctx.totals = totals
        ctx.absolute = absolute
        if coef is None:
            return masked_relu(x, mask, residual=residual, trials=False)
        return masked_poly(x, mask, coef, residual=residual, trials=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, residual, mask, coef = ctx.saved_tensors
        dx, sums = saliency_backward(grad, x, mask, coef, residual, ctx.absolute)
        ctx.totals += sums
        # dz is the gradient of x and of the residual: one tensor for both.
        return None, dx, dx if ctx.needs_input_grad[2] else None, None, None, None, None


saliency_backward = define(
    "saliency_backward(Tensor grad, Tensor x, Tensor mask, Tensor? coef, Tensor? residual, "
    "bool absolute) -> (Tensor dx, Tensor sums)",
    backward_call,
)
