"""Convolutions for training in channels_last on a CPU, faster or safer than oneDNN's.

Both modules compute the same as their nn.Conv2d, with that module's parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH_BYTES = 2**22  # patches multiplied at a time, as much as fits the cache
LANES = 16  # of the widest vectors
WIDE = 128  # channels


def for_training(module: nn.Module) -> nn.Module:
    """A better convolution for channels_last on a CPU, or the module itself."""
    if type(module) is not nn.Conv2d or module.weight.device.type != "cpu":
        return module
    plain = module.groups == 1 and module.dilation == (1, 1)
    if not plain or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return module
    if module.kernel_size != (1, 1):
        if module.in_channels >= WIDE:
            return PatchConvolution(module)
        return module
    strided = module.stride != (1, 1) and module.padding == (0, 0)
    if strided and module.in_channels < LANES:
        return StridedPointwise(module)
    return module


class _Wrapped(nn.Module):
    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv


class StridedPointwise(_Wrapped):
    """A 1×1 convolution with a stride, computed without one on the pixels that it reads.

    oneDNN's gradient of the weights writes past its workspace in channels_last when there are
    fewer input channels than a vector has lanes (uxlfoundation/oneDNN issue 6035).
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', ceil(H/stride), ceil(W/stride)]."""
        down, right = self.conv.stride
        return F.conv2d(x[:, :, ::down, ::right], self.conv.weight, self.conv.bias)


class PatchConvolution(_Wrapped):
    """A convolution whose weight gradient is a matrix product, for 128 channels or more.

    oneDNN reaches 40 to 67 GFLOP/s there, its forward pass 100 (AVX2, one core); the product of
    patches, including their copy, 74 to 83.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H', W']."""
        conv = self.conv
        autocast = torch.is_autocast_enabled(x.device.type)
        if autocast or x.dtype != torch.float32 or not conv.weight.requires_grad:
            return conv(x)
        return _Convolution.apply(x, conv.weight, conv.bias, conv.stride, conv.padding)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, *how: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how  # stride, padding
        return torch.conv2d(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx, _, dbias = torch.ops.aten.convolution_backward(
            grad, x, weight, [len(weight)], *ctx.how, [1, 1], False, [0, 0], 1,
            [need_x, False, need_bias],
        )  # fmt: skip
        dweight = None
        if need_weight:
            dweight = weight_gradient(grad, x, weight.shape[2:], *ctx.how)
        return dx, dweight, dbias, None, None


def weight_gradient(
    grad: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any
) -> Tensor:
    """dW[o, i, u, v] = Σ grad[b, o, p, q] · x[b, i, p·stride + u - padding, …], channels_last.

    As grad' [pixels, C'] times the patches of x [pixels, kernel·C], a few images at a time.
    """
    height, width = kernel
    down, right = stride
    top, left = padding
    outputs, rows, columns = grad.shape[1:]
    inputs = x.shape[1]
    numbers = height * width * inputs  # in a patch
    total = x.new_zeros(outputs, numbers)
    each = max(1, PATCH_BYTES // (4 * rows * columns * numbers))
    for images, grads in zip(x.split(each), grad.split(each), strict=True):
        padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, left, left, top, top))
        b, y, z, _ = padded.stride()
        patches = padded.as_strided(
            (len(images), rows, columns, height, width * inputs),
            (b, y * down, z * right, y, 1),
        ).reshape(-1, numbers)
        total.addmm_(grads.permute(0, 2, 3, 1).reshape(-1, outputs).t(), patches)
    return total.view(outputs, height, width, inputs).permute(0, 3, 1, 2)
