"""Batch norms folded into what stands beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def fold_convolution(conv: nn.Conv2d, norm: Any) -> Callable[[Tensor], Tensor]:
    """x -> conv(x), or norm(conv(x)), for x in channels_last order."""
    weight = conv.weight.detach()
    bias = None if conv.bias is None else conv.bias.detach()
    if norm is not None:
        # bn(w*x + b) = (scale*w)*x + (scale*b + shift)
        scale, shift = scale_and_shift(norm)
        weight = weight * scale.reshape(-1, 1, 1, 1)
        bias = shift if bias is None else bias * scale + shift
    weight = weight.contiguous(memory_format=torch.channels_last)
    tail: Any = (conv.stride, conv.padding, conv.dilation, conv.groups)
    return lambda x: F.conv2d(x, weight, bias, *tail)
