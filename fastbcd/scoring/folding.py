"""Batch norms folded into what stands beside them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """bn(x) = x*scale + shift, scale = weight / sqrt(var + eps), shift = bias - mean*scale."""
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    dtype = norm.running_mean.dtype
    return scale.to(dtype), shift.to(dtype)


class Convolution(NamedTuple):
    """x -> conv2d(x) with its constants at hand, for x in channels_last order."""

    weight: Tensor  # [C_out, C_in / groups, kh, kw]
    bias: Tensor | None  # [C_out]
    stride: tuple[int, int]
    padding: tuple[int, int] | str
    dilation: tuple[int, int]
    groups: int

    def __call__(self, x: Tensor) -> Tensor:
        return F.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


def folded(conv: nn.Conv2d, norm: Any) -> Convolution:
    """conv, or norm(conv(x)), as one convolution."""
    weight = conv.weight.detach()
    bias = None if conv.bias is None else conv.bias.detach()
    if norm is not None:
        # bn(w*x + b) = (scale*w)*x + (scale*b + shift)
        scale, shift = scale_and_shift(norm)
        weight = weight * scale.reshape(-1, 1, 1, 1)
        bias = shift if bias is None else bias * scale + shift
    weight = weight.contiguous(memory_format=torch.channels_last)
    tail: Any = (conv.stride, conv.padding, conv.dilation, conv.groups)
    return Convolution(weight, bias, *tail)
