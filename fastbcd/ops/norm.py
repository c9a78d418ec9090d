"""norm_masked: batch norm in train mode, residual and masked activation as one op.

    y = masked(norm(x)*weight + bias + residual)

With the batch's mean and variance, norm, weight and bias are a scale and a shift per channel, which
the masked activation applies in its own pass. Backward, with x̂ = (x - mean)/σ and n values per
channel, dz from the masked activation:

    dbias = Σ dz,  dweight = Σ dz·x̂,  dx = weight/σ · (dz - dbias/n - x̂·dweight/n)

Σ dz·x̂ is (Σ dz·x - mean·Σ dz)/σ: as in the forward, a mean of k σ costs a factor k of precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbcd.ops.registry import OPERATORS, differentiated


def norm_masked(
    x: Tensor, mask: Tensor, coef: Tensor | None, residual: Tensor | None, *, norm: Any
) -> Tensor:
    """act(norm(x) + residual) with the statistics of x; updates the norm's running statistics.

    x, residual: [B, C, *spatial]. mask: [C, *spatial]. coef: as in `masked`. norm: a BatchNorm2d
    with parameters and running statistics.

    >>> norm, x = torch.nn.BatchNorm2d(1, eps=0.0), torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
    >>> norm_masked(x, torch.ones(1, 1, 1, dtype=torch.bool), None, None, norm=norm).flatten()
    tensor([0., 1.], grad_fn=<ViewBackward0>)
    """
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        mean, variance = torch.batch_norm_update_stats(
            x, norm.running_mean, norm.running_var, norm.momentum
        )
    statistics = torch.stack([mean, variance + norm.eps])
    return _NormMasked.apply(
        x, norm.weight, norm.bias, mask, coef, residual, statistics, norm.eps
    )


def _affine(statistics: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """The mean, 1/σ, and the scale and shift of the norm; statistics: the mean and σ²."""
    mean, variance = statistics
    inverse = variance.rsqrt()
    scale = weight * inverse
    return mean, inverse, scale, bias - mean * scale


class _NormMasked(torch.autograd.Function):
    """The masked activation with a scale and a shift that depend on x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mask: Tensor,
        coef: Tensor | None,
        residual: Tensor | None,
        statistics: Tensor,
        eps: float,
    ) -> Tensor:
        _, _, scale, shift = _affine(statistics, weight, bias)
        y = OPERATORS["masked"].run(
            x, mask, coef, scale, shift, residual, None, False, 0
        )
        ctx.eps = eps
        read: tuple[Tensor | None, ...] = (None, residual)
        if coef is None:  # y alone tells which elements passed
            read = (y, None)
        ctx.save_for_backward(*read, x, weight, bias, mask, coef, statistics)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, residual, x, weight, bias, mask, coef, statistics = ctx.saved_tensors
        again = differentiated()
        if again:  # then the statistics are functions of x
            variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
            statistics = torch.stack([mean, variance + ctx.eps])
        mean, inverse, scale, shift = _affine(statistics, weight, bias)
        dx, dresidual, sums, _ = OPERATORS["masked_backward"].derivative(
            grads[0], y, x, mask, coef, scale, shift if y is None else None, residual,
            False, False, False, ctx.needs_input_grad[5], True, 0,
        )  # fmt: skip
        dcoef = sums[:-2]
        dscale = sums[-2]
        dbias = sums[-1]
        dweight = (dscale - mean * dbias) * inverse
        # dx is dz*scale so far; the rest is a line of x for each channel.
        count = x.numel() // x.shape[1]
        slope = -scale * inverse * dweight / count
        constant = -scale * dbias / count - slope * mean
        if again:
            dx = dx + x * slope[:, None, None] + constant[:, None, None]
        else:
            none = torch.zeros_like(mask)
            OPERATORS["masked_out"].run(x, none, None, slope, constant, dx, False, dx)
        if coef is None:
            dcoef = None
        if not ctx.needs_input_grad[5]:
            dresidual = None
        return dx, dweight, dbias, None, dcoef, dresidual, None, None
