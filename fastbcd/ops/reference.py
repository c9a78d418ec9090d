"""What the ops compute, in plain PyTorch: the definition that every kernel is tested against.

    z = x * scale + shift + residual          (each optional; scale and shift per channel)
    masked_relu(z) = relu(z)  where the bit is 1, else z
    masked_poly(z) = relu(z)  where the bit is 1, else c2*z² + c1*z + c0
    soft_relu(z)   = a*relu(z) + (1 - a)*z    (SNL: a real number per unit instead of the bit)

Arithmetic is in fp32 (fp64 for fp64 inputs) with one rounding per operation and none fused, and
one rounding to the input's dtype at the end. Every backend follows that rule and agrees to the
last bit; only sums over the batch may differ in their last digits.

Shapes, for a site of shape S = (C, *spatial):

    x         [B, *S]; with trials [T, B, *S], or [B, *S] shared by all trials
    residual  the same choice, independently of x
    mask      [*S]; with trials [T, *S]                    bool or uint8, 1 = this ReLU is kept
    scale     [C], shift [C], coef [3, C]                  coef[i] belongs to z**i
    alpha     [*S], aux [*S]                               no trials with these
    y         [B, *S]; with trials [T, B, *S]

All functions, the `_backward` ones included, are differentiable by autograd any number of times.
"""

from __future__ import annotations

from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

from fastbcd.kernels.geometry import compute_dtype, is_shared

Maybe: TypeAlias = Tensor | None


def masked_relu(
    x: Tensor,
    mask: Tensor,
    scale: Maybe = None,
    shift: Maybe = None,
    residual: Maybe = None,
    trials: bool = False,
) -> Tensor:
    """y = relu(z) where the bit is 1, else z."""
    z = _preactivation(x, mask, scale, shift, residual, trials)
    y = torch.where(_bits(mask, trials), torch.relu(z), z).to(x.dtype)
    return y if trials else y[0]


def masked_poly(
    x: Tensor,
    mask: Tensor,
    coef: Tensor,
    scale: Maybe = None,
    shift: Maybe = None,
    residual: Maybe = None,
    trials: bool = False,
) -> Tensor:
    """y = relu(z) where the bit is 1, else c2*z² + c1*z + c0, coef [3, C] = (c0, c1, c2)."""
    z = _preactivation(x, mask, scale, shift, residual, trials)
    bits = _bits(mask, trials)
    # An infinite z under a kept ReLU must not reach the polynomial: 0 * inf in its gradient.
    y = torch.where(bits, torch.relu(z), _poly(z.masked_fill(bits, 0), coef)).to(x.dtype)
    return y if trials else y[0]


def masked_relu_backward(
    grad: Tensor,
    y: Tensor,
    mask: Tensor,
    x: Maybe,
    scale: Maybe,
    trials: bool,
    x_shared: bool,
    residual_shared: bool,
    want_residual: bool = True,
) -> tuple[Tensor, Maybe, Maybe]:
    """Derivatives of masked_relu: dx, dresidual, and d(scale, shift) [2, C] if x is given.

    dz = grad, but 0 where the bit is 1 and y <= 0: the output alone tells. (In 16-bit types a
    positive z may round to y = 0, and then has no gradient, as in eager relu.)
    """
    dz = _gradient(_expand(grad, mask, trials), _expand(y, mask, trials), _bits(mask, trials))
    dx = _scaled(dz, scale)
    return (
        _collect(dx, x_shared or not trials, grad.dtype),
        _collect(dz, residual_shared or not trials, grad.dtype) if want_residual else None,
        None if x is None else _affine_gradient(dz, _expand(x, mask, trials)),
    )


def masked_poly_backward(
    grad: Tensor,
    x: Tensor,
    mask: Tensor,
    coef: Tensor,
    scale: Maybe,
    shift: Maybe,
    residual: Maybe,
    trials: bool,
    want_residual: bool = True,
) -> tuple[Tensor, Maybe, Tensor, Maybe]:
    """Derivatives of masked_poly: dx, dresidual, dcoef [3, C], and d(scale, shift) if scale.

    dz = grad * (1[z > 0] where the bit is 1, else 2*c2*z + c1)
    dcoef[i] = sum over cleared bits of grad * z**i
    """
    z = _preactivation(x, mask, scale, shift, residual, trials)
    bits = _bits(mask, trials)
    g = _expand(grad, mask, trials)
    dz = _gradient(g, z, bits, coef)
    dx = _scaled(dz, scale)
    cleared = g.masked_fill(bits, 0)
    powers = z.masked_fill(bits, 0)
    residual_shared = residual is not None and is_shared(residual, mask, trials)
    return (
        _collect(dx, is_shared(x, mask, trials) or not trials, grad.dtype),
        _collect(dz, residual_shared or not trials, grad.dtype) if want_residual else None,
        torch.stack([_sum_channels(cleared * powers**i) for i in range(3)]),
        None if scale is None else _affine_gradient(dz, _expand(x, mask, trials)),
    )


def _preactivation(
    x: Tensor, mask: Tensor, scale: Maybe, shift: Maybe, residual: Maybe, trials: bool
) -> Tensor:
    """z = x*scale + shift + residual [T or 1, B, *S]."""
    z = _expand(x, mask, trials)
    if scale is not None and shift is not None:
        z = z * _channelwise(scale, z) + _channelwise(shift, z)
    return z if residual is None else z + _expand(residual, mask, trials)


def _bits(mask: Tensor, trials: bool) -> Tensor:
    """The bits [T or 1, 1, *S] that meet z."""
    return mask.bool().unsqueeze(1) if trials else mask.bool()[None, None]


def _expand(t: Tensor, mask: Tensor, trials: bool) -> Tensor:
    """t -> [T or 1, B, *S] in the compute dtype; without trials T = 1."""
    t = t.to(compute_dtype(t.dtype))
    return t if trials and not is_shared(t, mask, trials) else t.unsqueeze(0)


def _channelwise(v: Tensor, like: Tensor) -> Tensor:
    """v [C] -> [C, 1...] against like [T, B, C, *spatial]."""
    return v.reshape(-1, *(1,) * (like.ndim - 3))


def _poly(z: Tensor, coef: Tensor) -> Tensor:
    """c2*z² + c1*z + c0 for z [T, B, C, *spatial]."""
    c0, c1, c2 = (_channelwise(c, z) for c in coef)
    return (c2 * z + c1) * z + c0


def _gradient(g: Tensor, z: Tensor, bits: Tensor, coef: Maybe = None) -> Tensor:
    """dz: g where z > 0 and the bit is 1; g, or g times the polynomial's slope, where it is 0."""
    removed = g
    if coef is not None:
        _, c1, c2 = (_channelwise(c, z) for c in coef)
        removed = g * (2 * c2 * z.masked_fill(bits, 0) + c1)
    return torch.where(bits, g.masked_fill(z <= 0, 0), removed)


def _scaled(dz: Tensor, scale: Maybe) -> Tensor:
    return dz if scale is None else dz * _channelwise(scale, dz)


def _collect(d: Tensor, one: bool, dtype: torch.dtype) -> Tensor:
    """d [T, B, *S] in the dtype; one: its sum over T, of a tensor that all trials share."""
    if one:
        # One trial after the other: torch.sum would choose an order of its own.
        d = reduce(torch.add, d) if len(d) else d.sum(0)
    return d.to(dtype)


def _affine_gradient(dz: Tensor, x: Tensor) -> Tensor:
    """d(scale, shift) [2, C]: the sums of dz*x and of dz."""
    return torch.stack([_sum_channels(dz * x), _sum_channels(dz)])


def _sum_channels(t: Tensor) -> Tensor:
    """[T, B, C, *spatial] -> [C], in double."""
    return t.double().transpose(0, 2).flatten(1).sum(1).to(t.dtype)


def _sum_batch(t: Tensor) -> Tensor:
    """[B, *S] -> [*S], in double."""
    return t.double().sum(0).to(t.dtype)


def soft_relu(x: Tensor, alpha: Tensor, residual: Maybe = None) -> Tensor:
    """y = a*relu(z) + (1 - a)*z, z = x + residual: z where z > 0, else (1 - a)*z."""
    z = _sum(x, residual)
    return torch.where(z > 0, z, (1 - alpha) * z).to(x.dtype)


def soft_relu_backward(
    grad: Tensor, x: Tensor, alpha: Tensor, residual: Maybe
) -> tuple[Tensor, Tensor]:
    """Derivatives of soft_relu: dx (which is dresidual too) and dalpha [*S].

    dz = grad * (a*1[z > 0] + 1 - a)
    dalpha = sum over the batch of grad * relu(-z)
    """
    z = _sum(x, residual)
    g = grad.to(alpha.dtype)
    dx = torch.where(z > 0, g, g * (1 - alpha)).to(grad.dtype)
    return dx, _sum_batch((g * -z).masked_fill(z > 0, 0))


def indicator_poly(
    x: Tensor, mask: Tensor, coef: Tensor, aux: Tensor, residual: Maybe = None
) -> Tensor:
    """y = masked_poly(x + residual); the gradient of its bits is passed to aux."""
    return masked_poly(x, mask, coef, None, None, residual)


def indicator_poly_backward(
    grad: Tensor, x: Tensor, mask: Tensor, coef: Tensor, residual: Maybe
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of indicator_poly: dx, dcoef [3, C], and dmask [*S], the gradient of the bits.

    dx and dcoef are those of masked_poly. As if the bits were numbers m with
    y = m*relu(z) + (1 - m)*poly(z): dmask = sum over the batch of grad * (relu(z) - poly(z))
    AutoReP's gradient of aux is softplus(aux) * dmask.
    """
    dx, _, dcoef, _ = masked_poly_backward(grad, x, mask, coef, None, None, residual, False)
    return dx, dcoef, _sum_batch(grad.to(coef.dtype) * _added_by_relu(_sum(x, residual), coef))


def _sum(x: Tensor, residual: Maybe) -> Tensor:
    """z = x + residual [B, *S] in the compute dtype."""
    z = x.to(compute_dtype(x.dtype))
    return z if residual is None else z + residual.to(z.dtype)


def _added_by_relu(z: Tensor, coef: Maybe) -> Tensor:
    """relu(z) - poly(z), or -min(z, 0) without coef, for z [B, *S]: what a set bit adds to y."""
    return z.clamp(max=0).neg() if coef is None else torch.relu(z) - _poly(z[None], coef)[0]


def norm_statistics(x: Tensor) -> Tensor:
    """[2, C]: the mean and the biased variance of x [B, C, *spatial]."""
    x = x.to(compute_dtype(x.dtype))
    variance, mean = torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=0)
    return torch.stack([mean, variance])


def norm_relu(
    x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, residual: Maybe, eps: float
) -> tuple[Tensor, Tensor]:
    """masked_relu(norm(x)*weight + bias + residual) and the statistics of x, without gradient."""
    statistics = norm_statistics(x)
    mean, variance = statistics
    scale = weight * (variance + eps).rsqrt()
    y = masked_relu(x, mask, scale, bias - mean * scale, residual)
    return y, statistics.detach()


def norm_relu_backward(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor,
    statistics: Tensor,
    eps: float,
    want_residual: bool = True,
) -> tuple[Tensor, Maybe, Tensor]:
    """Derivatives of norm_relu: dx, dresidual, and d(weight, bias) [2, C]."""
    mean, variance = statistics
    inverse = (variance + eps).rsqrt()
    dz = masked_relu_backward(grad, y, mask, None, None, False, False, False)[0]
    d = dz.to(weight.dtype).unsqueeze(0)
    u = x.to(weight.dtype).unsqueeze(0)
    xhat = (u - _channelwise(mean, u)) * _channelwise(inverse, u)
    dbias = _sum_channels(d)
    dweight = _sum_channels(d * xhat)
    count = x.numel() // x.shape[1]
    centred = d - _channelwise(dbias / count, d) - xhat * _channelwise(dweight / count, d)
    dx = _channelwise(weight * inverse, d) * centred
    dresidual = dz if want_residual else None
    return dx[0].to(grad.dtype), dresidual, torch.stack([dweight, dbias])


def kink(c: Tensor, a: Tensor, mask: Tensor, fresh: bool) -> Tensor:
    """mask · relu(-(c + a)) for c [n, T, B], a [n, B], mask [n, T]; c counts as 0 if fresh."""
    a = a.unsqueeze(1)
    z = a.expand_as(c) if fresh else c + a
    return torch.where(mask.bool().unsqueeze(2), torch.relu(-z), 0)


def saliency_backward(
    grad: Tensor, x: Tensor, mask: Tensor, coef: Maybe, residual: Maybe, absolute: bool
) -> tuple[Tensor, Tensor]:
    """dx of a masked activation, and the first-order effects of removals, summed over the batch.

    A removal adds min(z, 0) to the output of a kept unit, or poly(z) - relu(z) if there is coef,
    and a return takes as much from that of a removed one:
    sums [*S] = sum of grad * added, or of |grad * added|
    """
    z = _sum(x, residual)
    g = grad.to(compute_dtype(grad.dtype))
    dx = _gradient(g[None], z[None], mask.bool(), coef)[0].to(grad.dtype)
    effect = g * -_added_by_relu(z, coef)
    return dx, _sum_batch(effect.abs() if absolute else effect)
