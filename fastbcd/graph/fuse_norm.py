"""Batch norm in train mode, residual and masked ReLU as one call, for training on a CPU.

    y = act(norm(x)·weight + bias + residual)

With mean and variance of the batch known, norm, weight and bias are a scale and a shift by
channel, which `ops.masked_relu` applies on its way: one pass for the statistics and one for the
rest, instead of five. Backward, with x̂ = (x - mean)/σ and n values a channel:

    dz = grad where the ReLU let it pass;  dbias = Σ dz,  dweight = Σ dz·x̂
    dx = weight/σ · (dz - dbias/n - x̂·dweight/n)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbcd import kernels, ops
from fastbcd.kernels.geometry import dense, geometry
from fastbcd.masking.activations import MaskedReLU


class NormActivation(nn.Module):
    """act(norm(x) [+ residual]) with the net's own modules; plain where one call cannot do it."""

    def __init__(self, norm: nn.BatchNorm2d, act: MaskedReLU) -> None:
        super().__init__()
        self.norm, self.act = norm, act

    def forward(self, x: Tensor, residual: Any = None) -> Tensor:
        """x, residual [B, C, H, W] -> [B, C, H, W]."""
        if not self.norm.training or not _suits(x) or not (residual is None or _suits(residual, x)):
            z = self.norm(x)
            return self.act(z if residual is None else z + residual)
        norm: Any = self.norm
        y, mean, variance = _NormActivation.apply(
            x, norm.weight, norm.bias, residual, self.act.mask, norm.eps
        )
        with torch.no_grad():
            count = x.numel() // x.shape[1]
            norm.num_batches_tracked.add_(1)
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
        return y


def fits(norm: Any, act: Any) -> bool:
    """Is this pair one that NormActivation can serve?"""
    return (
        type(norm) is nn.BatchNorm2d
        and type(act) is MaskedReLU
        and norm.affine
        and norm.running_mean is not None
        and norm.momentum is not None
        and norm.weight.dtype == torch.float32
        and norm.weight.device.type == "cpu"
        and kernels.CPU.module is not None
        and not kernels.INTERPRETED
    )


def _suits(x: Any, like: Tensor | None = None) -> bool:
    """float32 [B, C, H, W] in channels_last memory, with more than one value a channel."""
    return (
        isinstance(x, Tensor)
        and x.ndim == 4
        and x.dtype == torch.float32
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.numel() > x.shape[1]
        and (like is None or x.shape == like.shape)
        and not torch.compiler.is_compiling()
    )


class _NormActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Any, mask: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        statistics = weight.new_empty(2, x.shape[1])
        torch.ops.fastbcd_cpu.norm_statistics.default(statistics, x, x.shape[1])
        mean, variance = statistics
        inverse = (variance + eps).rsqrt()
        scale = weight * inverse
        y = ops.masked_relu(
            x, mask, scale=scale, shift=bias - mean * scale, residual=residual, trials=False
        )
        ctx.save_for_backward(x, y, mask, mean, inverse, scale)
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, y, mask, mean, inverse, scale = ctx.saved_tensors
        grad = dense(grad, 1, True)
        mask = dense(mask, 0)
        channels, count = x.shape[1], x.numel() // x.shape[1]
        dz, sums = torch.empty_like(x), scale.new_empty(2, channels)
        g = geometry(x, mask, None, False)
        if not g.channels_last:  # one channel, or one pixel: both orders are the same memory
            g = g._replace(channels_last=True, mask_last=True)
        torch.ops.fastbcd_cpu.norm_backward.default(dz, sums, grad, y, x, mask, mean, g)
        dbias, dweight = sums[0], sums[1] * inverse
        # dx = dz·scale + x·slope + constant
        slope = -scale * inverse * dweight / count
        coefficients = torch.stack([scale, slope, -scale * dbias / count - slope * mean])
        needs_residual = ctx.needs_input_grad[3]
        dx = torch.empty_like(dz) if needs_residual else dz
        torch.ops.fastbcd_cpu.norm_input_gradient.default(dx, dz, x, coefficients, channels)
        return dx, dweight, dbias, dz if needs_residual else None, None, None
