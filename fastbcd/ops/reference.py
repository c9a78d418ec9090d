"""What the fused ops mean, in plain PyTorch: the truth that every kernel is tested against.

    z = x * scale + shift + residual          (each optional; scale and shift per channel)
    masked_relu(z) = relu(z)  where the bit is 1, else z
    masked_poly(z) = relu(z)  where the bit is 1, else c2*z² + c1*z + c0
    soft_relu(z)   = a*relu(z) + (1 - a)*z    (SNL: a real number a unit in place of the bit)

Arithmetic is in fp32 (fp64 for fp64 inputs) with one rounding per operation and none fused,
and one rounding to the input's dtype at the end. Every backend keeps that rule, so it is
expected to agree to the last bit, not to a tolerance; only sums over the batch may differ in
their last digits.

Shapes, for a site of shape S = (C, *spatial):

    x         [B, *S]; with trials [T, B, *S], or [B, *S] shared by all trials
    residual  the same choice, independently of x
    mask      [*S]; with trials [T, *S]                    bool or uint8, 1 = this ReLU is kept
    scale     [C], shift [C], coef [3, C]                  coef[i] belongs to z**i
    alpha     [*S], aux [*S]                               no trials with these
    y         [B, *S]; with trials [T, B, *S]

`masked_relu` and `masked_poly` are differentiable by autograd; their `_backward` companions
state the derivatives as formulas, for use below autograd.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fastbcd.kernels.geometry import compute_dtype, is_shared


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


# ------------------------------------------------------- the activations of SNL and AutoReP


def soft_relu(x: Tensor, alpha: Tensor, residual: Tensor | None = None) -> Tensor:
    """y = a*relu(z) + (1 - a)*z, z = x + residual: z where z > 0, else (1 - a)*z.

    >>> soft_relu(torch.tensor([[-1.0, -1.0, 2.0]]), torch.tensor([1.0, 0.25, 0.5]))
    tensor([[-0.0000, -0.7500,  2.0000]])
    """
    z = _sum(x, residual)
    return torch.where(z > 0, z, (1 - alpha) * z).to(x.dtype)


def soft_relu_backward(
    grad: Tensor, x: Tensor, alpha: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Derivatives of soft_relu: dx (which is dresidual too) and dalpha [*S].

    dz = grad * (a*1[z > 0] + 1 - a)
    dalpha = sum over the batch of grad * relu(-z)
    """
    z, g = _sum(x, residual), grad.to(alpha.dtype)
    dx = torch.where(z > 0, g, g * (1 - alpha)).to(grad.dtype)
    return dx, _sum_batch((g * -z).masked_fill(z > 0, 0))


def indicator_poly_backward(
    grad: Tensor, x: Tensor, mask: Tensor, coef: Tensor, aux: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """AutoReP's derivatives of masked_poly, whose mask follows aux: dx, dcoef [3, C], daux [*S].

    dx and dcoef are masked_poly's; the gradient of the bit goes straight through to aux:
    daux = softplus(aux) * sum over the batch of grad * (relu(z) - poly(z))
    """
    dx, _, dcoef, _ = masked_poly_backward(grad, x, mask, coef, None, None, residual, False)
    return dx, dcoef, softplus(aux) * indicator_sums(grad, x, coef, residual)


def indicator_sums(grad: Tensor, x: Tensor, coef: Tensor, residual: Tensor | None) -> Tensor:
    """The gradient of the bits [*S], as if they were numbers m: y = m*relu(z) + (1 - m)*poly(z)."""
    z = _sum(x, residual)
    c0, c1, c2 = (c.reshape(-1, *(1,) * (z.ndim - 2)) for c in coef)
    poly = (c2 * z + c1) * z + c0
    return _sum_batch(grad.to(coef.dtype) * (torch.relu(z) - poly))


# --------------------------------------------------------------- what a removal would change


def saliency_backward(
    grad: Tensor,
    x: Tensor,
    mask: Tensor,
    coef: Tensor | None,
    residual: Tensor | None,
    absolute: bool,
) -> tuple[Tensor, Tensor]:
    """dx of a masked activation, and what removals change to first order, summed over the batch.

    A removal adds min(z, 0) to the output of a kept unit, or poly(z) - relu(z) if there is coef:
    sums [*S] = sum of grad * added, or of |grad * added|, where the bit is 1; 0 where it is 0
    """
    z, g, bits = _sum(x, residual), grad.to(compute_dtype(grad.dtype)), mask.bool()
    added, other = z.masked_fill(z > 0, 0), g
    if coef is not None:
        c0, c1, c2 = (c.reshape(-1, *(1,) * (z.ndim - 2)) for c in coef)
        added = ((c2 * z + c1) * z + c0) - torch.relu(z)
        other = g * (2 * c2 * z + c1)
    dx = torch.where(bits, g.masked_fill(z <= 0, 0), other).to(grad.dtype)
    effect = (g * added).abs() if absolute else g * added
    return dx, _sum_batch(effect.masked_fill(~bits, 0))


def _sum(x: Tensor, residual: Tensor | None) -> Tensor:
    """z = x + residual [B, *S] in the compute dtype."""
    z = x.to(compute_dtype(x.dtype))
    return z if residual is None else z + residual.to(z.dtype)


def _sum_batch(t: Tensor) -> Tensor:
    """[B, *S] -> [*S], in double."""
    return t.double().sum(0).to(t.dtype)
