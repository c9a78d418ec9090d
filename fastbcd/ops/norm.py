"""norm_relu: batch norm in train mode, residual and masked ReLU as one op.

    y = masked_relu(norm(x)*weight + bias + residual)

With the batch's mean and variance, norm, weight and bias are a scale and a shift per channel, which
the masked ReLU applies in its own pass. Backward, with x̂ = (x - mean)/σ and n values per channel:

    dz = grad where the ReLU let it pass;  dbias = Σ dz,  dweight = Σ dz·x̂
    dx = weight/σ · (dz - dbias/n - x̂·dweight/n)

The C++ kernel takes float32 in channels_last order; the reference runs for everything else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbcd import kernels
from fastbcd.kernels.geometry import dense_together, item_order, orders_coincide
from fastbcd.ops import reference
from fastbcd.ops.calls import KernelCall, contiguous
from fastbcd.ops.registry import define, differentiated


def norm_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mask: Tensor,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """y [B, C, *spatial] and the statistics [2, C]: mean and biased variance of x.

    x, residual: [B, C, *spatial]. weight, bias: [C]. mask: [C, *spatial]. The statistics have no
    gradient.

    >>> x, mask = torch.tensor([[1.0], [3.0]]), torch.tensor([True])
    >>> y, statistics = norm_relu(x, torch.ones(1), torch.zeros(1), mask, eps=0.0)
    >>> y, statistics
    (tensor([[0.],
            [1.]]), tensor([[2.],
            [1.]]))
    """
    return _norm_relu(x, weight, bias, mask, residual, eps)


def has_kernel(x: Tensor) -> bool:
    """Is there a kernel for tensors with the dtype and device of x?"""
    return (
        x.dtype == torch.float32 and kernels.choose("norm_relu_forward", x) is not None
    )


def _fits(x: Tensor) -> bool:
    """Does a kernel take the dense x?"""
    return x.dtype == torch.float32 and bool(item_order(x, 1) or orders_coincide(x, 1))


def _forward_call(x, weight, bias, mask, residual, eps) -> KernelCall:
    mask, x, residual = dense_together(mask, False, x, residual)
    return KernelCall(
        outputs=[torch.empty_like(x), weight.new_empty(2, x.shape[1])],
        inputs=(x, contiguous(weight), contiguous(bias), mask, residual, eps),
        geometry=(x, mask),
        fits=_fits(x),
    )


def _backward_call(
    grad, y, x, weight, mask, statistics, eps, want_residual
) -> KernelCall:
    mask, x, y, grad = dense_together(mask, False, x, y, grad)
    dresidual = torch.empty_like(x) if want_residual else None
    return KernelCall(
        outputs=[torch.empty_like(x), dresidual, weight.new_empty(2, x.shape[1])],
        inputs=(grad, y, x, contiguous(weight), mask, statistics, eps),
        geometry=(x, mask),
        fits=_fits(x),
    )


_norm_relu = define(
    "norm_relu(Tensor x, Tensor weight, Tensor bias, Tensor mask, Tensor? residual, float eps) "
    "-> (Tensor y, Tensor statistics)",
    _forward_call,
)
_norm_relu_backward = define(
    "norm_relu_backward(Tensor grad, Tensor y, Tensor x, Tensor weight, Tensor mask, "
    "Tensor statistics, float eps, bool want_residual) "
    "-> (Tensor dx, Tensor dresidual, Tensor dparameters)",
    _backward_call,
)


def _setup(ctx, inputs, output) -> None:
    x, weight, _, mask, _, ctx.eps = inputs
    y, statistics = output
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(y, x, weight, mask, statistics)


def _gradients(ctx, grad, _):
    y, x, weight, mask, statistics = ctx.saved_tensors
    if differentiated():  # then the statistics are a function of x
        statistics = reference.norm_statistics(x)
    want_residual = ctx.needs_input_grad[4]
    dx, dresidual, (dweight, dbias) = _norm_relu_backward.derivative(
        grad, y, x, weight, mask, statistics, ctx.eps, want_residual
    )
    return dx, dweight, dbias, None, dresidual if want_residual else None, None


_norm_relu.differentiate(_setup, _gradients)
