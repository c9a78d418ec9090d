"""norm_relu: batch norm in train mode, residual and masked ReLU as one op.

    y = masked_relu(norm(x)*weight + bias + residual)

With the mean and the variance of the batch known, norm, weight and bias are a scale and a shift
per channel, which the masked ReLU applies in its own pass: one pass for the statistics and one for
the rest, instead of five. Backward, with x̂ = (x - mean)/σ and n values per channel:

    dz = grad where the ReLU let it pass;  dbias = Σ dz,  dweight = Σ dz·x̂
    dx = weight/σ · (dz - dbias/n - x̂·dweight/n)

The C++ kernel takes float32 in channels_last order; the reference runs for everything else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbcd import kernels
from fastbcd.kernels.geometry import dense, item_order, orders_coincide
from fastbcd.ops import reference
from fastbcd.ops.registry import (
    Call,
    contiguous,
    define,
    differentiate,
    differentiated,
    transformed,
)


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
    function = reference.norm_relu if transformed() else _norm_relu
    return function(x, weight, bias, mask, residual, eps)


def has_kernel(x: Tensor) -> bool:
    """Is there a kernel for tensors with the dtype and device of x?"""
    return x.dtype == torch.float32 and kernels.choose("norm_relu_forward", x) is not None


def _lay_out(x: Tensor, *others: Any) -> tuple[Any, ...]:
    """x and the others as dense memory in x's order; whether a kernel takes that order."""
    x = dense(x, 1)
    order = item_order(x, 1)
    fits = x.dtype == torch.float32 and bool(order or orders_coincide(x, 1))
    return fits, x, *(None if t is None else dense(t, 1, order) for t in others)


def _forward_call(x, weight, bias, mask, residual, eps) -> Call:
    fits, x, residual = _lay_out(x, residual)
    mask, weight, bias = dense(mask, 0), contiguous(weight), contiguous(bias)
    outputs = [torch.empty_like(x), weight.new_empty(2, x.shape[1])]
    return Call(outputs, (x, weight, bias, mask, residual, eps), (x, mask), fits=fits)


def _backward_call(grad, y, x, weight, mask, statistics, eps, want_residual) -> Call:
    fits, x, y, grad = _lay_out(x, y, grad)
    mask, weight = dense(mask, 0), contiguous(weight)
    dresidual = torch.empty_like(x) if want_residual else None
    outputs = [torch.empty_like(x), dresidual, weight.new_empty(2, x.shape[1])]
    return Call(outputs, (grad, y, x, weight, mask, statistics, eps), (x, mask), fits=fits)


_norm_relu = define(
    "norm_relu(Tensor x, Tensor weight, Tensor bias, Tensor mask, Tensor? residual, float eps) "
    "-> (Tensor y, Tensor statistics)",
    _forward_call, reference.norm_relu, "norm_relu_forward",
)  # fmt: skip
_norm_relu_backward = define(
    "norm_relu_backward(Tensor grad, Tensor y, Tensor x, Tensor weight, Tensor mask, "
    "Tensor statistics, float eps, bool want_residual) "
    "-> (Tensor dx, Tensor dresidual, Tensor dparameters)",
    _backward_call, reference.norm_relu_backward,
)  # fmt: skip


def _setup(ctx, inputs, output) -> None:
    x, weight, _, mask, _, ctx.eps = inputs
    y, statistics = output
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(y, x, weight, mask, statistics)


def _gradients(ctx, grad, _):
    y, x, weight, mask, statistics = ctx.saved_tensors
    needs_residual = ctx.needs_input_grad[4]
    if differentiated():  # then the statistics are a function of x
        statistics = reference.norm_statistics(x)
        arguments = (grad, y, x, weight, mask, statistics, ctx.eps)
        dx, dresidual, (dweight, dbias) = reference.norm_relu_backward(*arguments)
    else:
        arguments = (grad, y, x, weight, mask, statistics, ctx.eps)
        dx, dresidual, (dweight, dbias) = _norm_relu_backward(*arguments, needs_residual)
    return dx, dweight, dbias, None, dresidual if needs_residual else None, None


differentiate("norm_relu", _setup, _gradients)
