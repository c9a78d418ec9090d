"""What the fused ops mean, in plain PyTorch: the truth that every kernel is tested against.

    z = x * scale + shift + residual          (each optional; scale and shift per channel)
    masked_relu(z) = relu(z)  where the bit is 1, else z
    masked_poly(z) = relu(z)  where the bit is 1, else c2*z² + c1*z + c0

Arithmetic is in fp32 (fp64 for fp64 inputs) with one rounding per operation and none fused,
and one rounding to the input's dtype at the end. Every backend keeps that rule, so it is
expected to agree to the last bit, not to a tolerance; only sums over the batch may differ in
their last digits.

Shapes, for a site of shape S = (C, *spatial):

    x         [B, *S]; with trials [T, B, *S], or [B, *S] shared by all trials
    residual  the same choice, independently of x
    mask      [*S]; with trials [T, *S]                    bool or uint8, 1 = this ReLU is kept
    scale     [C], shift [C], coef [3, C]                  coef[i] belongs to z**i
    y         [B, *S]; with trials [T, B, *S]

`masked_relu` and `masked_poly` are differentiable by autograd; their `_backward` companions
state the derivatives as formulas, for use below autograd.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the ops calculate on tensors of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_shared(t: Tensor, mask: Tensor, trials: bool) -> bool:
    """True if t [B, *S] serves all trials of mask [T, *S]."""
    return trials and t.ndim == mask.ndim


def _expand(t: Tensor, mask: Tensor, trials: bool) -> Tensor:
    """t -> [T or 1, B, *S] in the compute dtype; without trials T = 1."""
    t = t.to(compute_dtype(t.dtype))
    return t if trials and not is_shared(t, mask, trials) else t.unsqueeze(0)


def _channelwise(v: Tensor, like: Tensor) -> Tensor:
    """v [C] -> [1, 1, C, 1...] against like [T, B, C, *spatial]."""
    return v.reshape(1, 1, -1, *(1,) * (like.ndim - 3))


def _preactivation(
    x: Tensor,
    mask: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    trials: bool,
) -> tuple[Tensor, Tensor]:
    """z = x*scale + shift + residual [T or 1, B, *S] and the bits [T, 1, *S] that meet it."""
    z = _expand(x, mask, trials)
    if scale is not None and shift is not None:
        z = z * _channelwise(scale, z) + _channelwise(shift, z)
    if residual is not None:
        z = z + _expand(residual, mask, trials)
    bits = mask.bool() if trials else mask.bool().unsqueeze(0)
    return z, bits.unsqueeze(1)


def masked_relu(
    x: Tensor,
    mask: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    trials: bool = False,
) -> Tensor:
    """y = relu(z) where the bit is 1, else z.

    >>> masked_relu(torch.tensor([[-1.0, -2.0, 3.0]]), torch.tensor([True, False, True]))
    tensor([[ 0., -2.,  3.]])
    """
    z, bits = _preactivation(x, mask, scale, shift, residual, trials)
    y = torch.where(bits, torch.relu(z), z).to(x.dtype)
    return y if trials else y[0]


def masked_relu_backward(
    grad: Tensor,
    y: Tensor,
    mask: Tensor,
    x: Tensor | None,
    scale: Tensor | None,
    trials: bool,
    x_shared: bool,
    residual_shared: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Derivatives of masked_relu: dx, dresidual, and d(scale, shift) [2, C] if x is given.

    dz = grad, but 0 where the bit is 1 and y <= 0: the output alone tells. (In 16-bit types a
    positive z may round to y = 0, and then has no gradient, as in eager relu.)
    """
    y_, bits = _preactivation(y, mask, None, None, None, trials)
    dz = _expand(grad, mask, trials).masked_fill(bits & (y_ <= 0), 0)
    return _spread(dz, grad.dtype, mask, x, scale, trials, x_shared, residual_shared)


def masked_poly(
    x: Tensor,
    mask: Tensor,
    coef: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    trials: bool = False,
) -> Tensor:
    """y = relu(z) where the bit is 1, else c2*z² + c1*z + c0, coef [3, C] = (c0, c1, c2).

    >>> square = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    >>> masked_poly(torch.tensor([[-3.0, -3.0]]), torch.tensor([True, False]), square)
    tensor([[0., 9.]])
    """
    z, bits = _preactivation(x, mask, scale, shift, residual, trials)
    c0, c1, c2 = (_channelwise(c, z) for c in coef)
    # An infinite z under a kept ReLU must not reach the polynomial: 0 * inf in its gradient.
    p = z.masked_fill(bits, 0)
    y = torch.where(bits, torch.relu(z), (c2 * p + c1) * p + c0).to(x.dtype)
    return y if trials else y[0]


def masked_poly_backward(
    grad: Tensor,
    x: Tensor,
    mask: Tensor,
    coef: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    trials: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Derivatives of masked_poly: dx, dresidual, dcoef [3, C], and d(scale, shift) if scale.

    dz = grad * (1[z > 0] where the bit is 1, else 2*c2*z + c1)
    dcoef[i] = sum over cleared bits of grad * z**i
    """
    z, bits = _preactivation(x, mask, scale, shift, residual, trials)
    g = _expand(grad, mask, trials)
    p = z.masked_fill(bits, 0)
    _, c1, c2 = (_channelwise(c, z) for c in coef)
    dz = torch.where(bits, g.masked_fill(z <= 0, 0), g * (2 * c2 * p + c1))
    cleared = g.masked_fill(bits, 0)
    dcoef = torch.stack([_sum_channels(cleared * p**i) for i in range(3)])
    shared = is_shared(x, mask, trials)
    residual_shared = residual is not None and is_shared(residual, mask, trials)
    x_if_affine = None if scale is None else x
    dx, dresidual, daffine = _spread(
        dz, grad.dtype, mask, x_if_affine, scale, trials, shared, residual_shared
    )
    return dx, dresidual, dcoef, daffine


def _sum_channels(t: Tensor) -> Tensor:
    """[T, B, C, *spatial] -> [C], in double."""
    return t.double().transpose(0, 2).flatten(1).sum(1).to(t.dtype)


def _spread(
    dz: Tensor,
    dtype: torch.dtype,
    mask: Tensor,
    x: Tensor | None,
    scale: Tensor | None,
    trials: bool,
    x_shared: bool,
    residual_shared: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dz [T, B, *S] -> dx = dz*scale, dresidual = dz, daffine = sum(dz*x), sum(dz)."""
    dx = dz if scale is None else dz * _channelwise(scale, dz)
    daffine = None
    if x is not None:
        products = dz * _expand(x, mask, trials)
        daffine = torch.stack([_sum_channels(products), _sum_channels(dz)])

    def collect(d: Tensor, shared: bool) -> Tensor:
        # One trial after the other: torch.sum would choose an order of its own.
        return (reduce(torch.add, d) if shared or not trials else d).to(dtype)

    return collect(dx, x_shared), collect(dz, residual_shared), daffine
