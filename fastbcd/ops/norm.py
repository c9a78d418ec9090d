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
from torch.autograd.function import once_differentiable

from fastbcd.ops.registry import OPERATORS


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
        inverse = (variance + norm.eps).rsqrt()
    return _NormMasked.apply(
        x, norm.weight, norm.bias, mask, coef, residual, mean, inverse
    )


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
        mean: Tensor,
        inverse: Tensor,
    ) -> Tensor:
        scale = weight * inverse
        shift = bias - mean * scale
        y = OPERATORS["masked"].run(
            x, mask, coef, scale, shift, residual, None, False, 0
        )
        saved: tuple[Tensor | None, ...] = (None, x, mask, coef, scale, shift, residual)
        if coef is None:  # y alone tells which elements passed
            saved = (y, x, mask, None, scale, None, None)
        ctx.save_for_backward(*saved, mean, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        *saved, mean, inverse = ctx.saved_tensors
        _, x, mask, _, scale, *_ = saved
        want_residual = ctx.needs_input_grad[5]
        dx, dresidual, sums, _ = OPERATORS["masked_backward"].run(
            grads[0], *saved, False, False, False, want_residual, True, 0
        )
        dcoef, dscale, dbias = sums[:-2], sums[-2], sums[-1]
        dweight = (dscale - mean * dbias) * inverse
        # dx is dz*scale so far; the rest is a line of x for each channel.
        count = x.numel() // x.shape[1]
        slope = -scale * inverse * dweight / count
        constant = -scale * dbias / count - slope * mean
        nothing = torch.zeros_like(mask)
        OPERATORS["masked_out"].run(x, nothing, None, slope, constant, dx, False, dx)
        return (
            dx,
            dweight,
            dbias,
            None,
            dcoef if len(dcoef) else None,
            dresidual,
            None,
            None,
        )
