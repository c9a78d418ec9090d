"""What the ops compute, in plain PyTorch: the definition that every kernel is tested against.

    z = x * scale + shift + residual        (each optional; scale and shift per channel)
    r(z) = z, c1*z + c0, or c2*z² + c1*z + c0
    masked(z) = relu(z)  where the bit is 1, else r(z)
              = a*relu(z) + (1 - a)*r(z)    where the mask has real numbers a instead of bits

Arithmetic is in fp32 (fp64 for fp64 inputs) with one rounding per operation and none fused, and
one rounding to the input's dtype at the end. Every backend follows that rule and agrees to the
last bit; only sums over the batch may differ in their last digits.

Shapes, for a site of shape S = (C, *spatial):

    x         [B, *S]; with trials [T, B, *S], or [B, *S] shared by all trials
    residual  the same choice, independently of x
    mask      [*S]; with trials [T, *S]           bool or uint8, 1 = this ReLU is kept
              [*S]                                floating-point: the numbers a
    scale     [C], shift [C], coef [2 or 3, C]    coef[i] belongs to z**i
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


def masked(
    x: Tensor,
    mask: Tensor,
    coef: Maybe = None,
    scale: Maybe = None,
    shift: Maybe = None,
    residual: Maybe = None,
    units: Maybe = None,
    trials: bool = False,
    kind: int = 0,
) -> Tensor:
    """y; `units` and `kind` say what the backward sums and change nothing here."""
    z = _preactivation(x, mask, scale, shift, residual, trials)
    a = _by_unit(mask, trials)
    rectified = torch.relu(z)
    if not mask.is_floating_point():
        # An infinite z under a kept ReLU must not reach the polynomial: 0 * inf in its gradient.
        y = torch.where(a, rectified, _replaced(z.masked_fill(a, 0), coef))
    elif coef is None:
        y = torch.where(z > 0, z, (1 - a) * z)
    else:
        y = a * rectified + (1 - a) * _replaced(z, coef)
    y = y.to(x.dtype)
    if trials:
        return y
    return y[0]


def masked_backward(
    grad: Tensor,
    y: Maybe,
    x: Maybe,
    mask: Tensor,
    coef: Maybe,
    scale: Maybe,
    shift: Maybe,
    residual: Maybe,
    trials: bool = False,
    x_shared: bool = False,
    residual_shared: bool = False,
    want_residual: bool = False,
    want_small: bool = False,
    units: int = 0,
) -> tuple[Tensor, Maybe, Maybe, Maybe]:
    """Derivatives of masked: dx, dresidual, the rows of dcoef, dscale and dshift, and dunits.

    With y, dz = grad, but 0 where the bit is 1 and y <= 0: the output alone tells. (In 16-bit types
    a positive z may round to y = 0, and then has no gradient, as in eager relu.) Else from z:

        dz = grad * (1[z > 0] where the bit is 1, else r'(z))
        dcoef[i] = sum over cleared bits of grad * z**i
        dunits = sum over the batch of grad * (relu(z) - r(z)), or (units = 2) of its absolute value

    With numbers a in place of bits, the first two are weighted by a and 1 - a.
    """
    g = _expand(grad, mask, trials)
    a = _by_unit(mask, trials)
    rows: list[Tensor] = []
    effects = None
    if y is not None:
        dz = torch.where(a, g.masked_fill(_expand(y, mask, trials) <= 0, 0), g)
    else:
        z = _preactivation(x, mask, scale, shift, residual, trials)
        dz, cleared, z_cleared = _bent(g, z, a, coef)
        if coef is not None:
            rows = [_sum_channels(cleared * z_cleared**i) for i in range(len(coef))]
        if units:
            effects = _effects(g, z, coef, absolute=units == 2)
    dx = dz
    if scale is not None:
        rows += [_sum_channels(dz * _expand(x, mask, trials)), _sum_channels(dz)]
        dx = dz * _channelwise(scale, dz)
    dresidual = None
    if want_residual:
        dresidual = _collect(dz, residual_shared or not trials, grad.dtype)
    small = None
    if rows and want_small:
        small = torch.stack(rows)
    return _collect(dx, x_shared or not trials, grad.dtype), dresidual, small, effects


def _bent(
    g: Tensor, z: Tensor, a: Tensor, coef: Maybe
) -> tuple[Tensor, Tensor, Tensor]:
    """dz, and the factors of dcoef: g and z where the ReLU is removed."""
    rectified = g.masked_fill(z <= 0, 0)
    if not a.is_floating_point():
        cleared = g.masked_fill(a, 0)
        z = z.masked_fill(a, 0)
        return torch.where(a, rectified, g * _slope(z, coef)), cleared, z
    cleared = g * (1 - a)
    if coef is None:
        return torch.where(z > 0, g, cleared), cleared, z
    return a * rectified + cleared * _slope(z, coef), cleared, z


def _effects(g: Tensor, z: Tensor, coef: Maybe, absolute: bool) -> Tensor:
    """Sums over the batch of g * (relu(z) - r(z)), what a set bit adds to y."""
    added = z.clamp(max=0).neg()
    if coef is not None:
        added = torch.relu(z) - _replaced(z, coef)
    effects = g * added
    if absolute:
        effects = effects.abs()
    return effects[0].double().sum(0).to(g.dtype)


def _preactivation(
    x: Maybe, mask: Tensor, scale: Maybe, shift: Maybe, residual: Maybe, trials: bool
) -> Tensor:
    """z = x*scale + shift + residual [T or 1, B, *S]."""
    z = _expand(x, mask, trials)
    if scale is not None:
        z = z * _channelwise(scale, z) + _channelwise(shift, z)
    if residual is not None:
        z = z + _expand(residual, mask, trials)
    return z


def _by_unit(mask: Tensor, trials: bool) -> Tensor:
    """The bits or numbers [T or 1, 1, *S] that meet z."""
    if not mask.is_floating_point():
        mask = mask.bool()
    if not trials:
        mask = mask.unsqueeze(0)
    return mask.unsqueeze(1)


def _expand(t: Maybe, mask: Tensor, trials: bool) -> Tensor:
    """t -> [T or 1, B, *S] in the compute dtype; without trials T = 1."""
    assert t is not None
    wide = t.to(compute_dtype(t.dtype))
    if trials and not is_shared(t, mask, trials):
        return wide
    return wide.unsqueeze(0)


def _channelwise(v: Maybe, like: Tensor) -> Tensor:
    """v [C] -> [C, 1...] against like [T, B, C, *spatial]."""
    assert v is not None
    return v.reshape(-1, *(1,) * (like.ndim - 3))


def _replaced(z: Tensor, coef: Maybe) -> Tensor:
    """r(z) for z [T, B, C, *spatial]: z, c1*z + c0, or (c2*z + c1)*z + c0."""
    if coef is None:
        return z
    c0, c1, *higher = (_channelwise(c, z) for c in coef)
    for c2 in higher:
        c1 = c2 * z + c1
    return c1 * z + c0


def _slope(z: Tensor, coef: Maybe) -> Tensor | int:
    """r'(z): 1, c1, or 2*c2*z + c1."""
    if coef is None:
        return 1
    _, c1, *higher = (_channelwise(c, z) for c in coef)
    for c2 in higher:
        c1 = 2 * c2 * z + c1
    return c1


def _collect(d: Tensor, one: bool, dtype: torch.dtype) -> Tensor:
    """d [T, B, *S] in the dtype; one: its sum over T, of a tensor that all trials share."""
    if one:
        # One trial after the other: torch.sum would choose an order of its own.
        d = reduce(torch.add, d) if len(d) else d.sum(0)
    return d.to(dtype)


def _sum_channels(t: Tensor) -> Tensor:
    """[T, B, C, *spatial] -> [C], in double."""
    return t.double().transpose(0, 2).flatten(1).sum(1).to(t.dtype)


def kink(c: Tensor, a: Tensor, mask: Tensor, fresh: bool) -> Tensor:
    """mask · relu(-(c + a)) for c [n, T, B], a [n, B], mask [n, T]; c counts as 0 if fresh."""
    z = a.unsqueeze(1).expand_as(c)
    if not fresh:
        z = z + c
    return torch.where(mask.bool().unsqueeze(2), torch.relu(-z), 0)
