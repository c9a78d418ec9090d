"""to_line and to_poly: removed ReLUs become lines or quadratics that start close to ReLU.

The identity is far from ReLU wherever x < 0. The line of least squares is much nearer and is as
linear, so a removal changes less and less training repairs it. Coefficients are those of a channel;
with z its pre-activations over some images and r = relu(z):

    c1 = cov(z, r) / var(z),  c0 = E r - c1·E z

A quadratic c2·z² + c1·z + c0 is nearer still. With all of the c2 of least squares a deep net
squares large activations again and again, so c2 is a share of it, and c1 and c0 are those of the
line nearest to r - c2·z².
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.data.for_net import data_for
from fastbcd.masking.activations import (
    REPLACEMENTS,
    LearnedActivation,
    MaskedActivation,
    MaskedLine,
    MaskedReLU,
)
from fastbcd.masking.masks import mask_modules
from fastbcd.masking.twin import twin
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.module_mode import eval_mode

IMAGES = 512  # that lines and quadratics are fitted to at most
BATCH = 64
# c2, a share of that of least squares. ResNet-20, 20,000 ReLUs, 15 epochs of 2,000 images: 0.1
# 86.4 %, 0.25 89.2, 0.5 93.0; 1 diverges. So does 0.5 in 30 epochs of 5,000 images, at 72,000
# ReLUs: the activations of 1 of 500 images are squared from layer to layer, to infinity.
SQUARES = 0.25


def to_line(net: nn.Module, data: Any) -> nn.Module:
    """A copy of a net with `MaskedLine` in place of `MaskedReLU`: the same weights and masks.

    The lines are fitted to the first images of the data. If no ReLU is removed, the copy computes
    the same as the net.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), fastbcd.MaskedReLU(3))
    >>> lines = to_line(net, (torch.randn(50, 1, 2, 2), torch.arange(50) % 3))
    >>> lines[2], lines[2].coef.shape
    (MaskedLine((3,)), torch.Size([2, 3]))
    """
    own = copy.deepcopy(net)
    fits = {mask: nearest(given, 0.0)[:2] for mask, given in moments(own, data).items()}
    return _replaced(net, own, "line", (MaskedReLU,), fits)


def to_poly(net: nn.Module, data: Any = None) -> nn.Module:
    """A copy of a net with `MaskedPoly` in place of other activations: the same weights and masks.

    A quadratic in place of `MaskedReLU` is fitted to the first images of the data; without data it
    starts as the identity. One in place of `MaskedLine` starts as its line. If no ReLU of a
    `MaskedReLU` is removed, or without data, the copy computes the same as the net.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), fastbcd.MaskedReLU(3))
    >>> to_poly(net)[2].coef[:, 0].tolist()
    [0.0, 1.0, 0.0]
    >>> poly = to_poly(net, (torch.randn(50, 1, 2, 2), torch.arange(50) % 3))
    >>> poly[2], bool((poly[2].coef[2] > 0).all())
    (MaskedPoly((3,)), True)
    """
    own = copy.deepcopy(net)
    fits = {}
    if data is not None:
        fits = {
            mask: nearest(given, SQUARES) for mask, given in moments(own, data).items()
        }
    return _replaced(net, own, "poly", (MaskedReLU, MaskedLine), fits)


def moments(net: nn.Module, data: Any) -> dict[Tensor, Tensor]:
    """E z, E z², E z³, E z⁴, E r, E zr, E z²r over the first images: [7, C] by a site's mask."""
    images = data_for(net, data)
    images = images.first(min(IMAGES, len(images)))
    sums: dict[Tensor, Any] = {}
    hook = partial(_add, sums)
    handles = [
        act.register_forward_pre_hook(hook, with_kwargs=True)
        for act in mask_modules(net).values()
    ]
    with eval_mode(net), torch.no_grad():
        for x, _ in images.batches(BATCH, dtype=dtype_of(net)):
            net(x)
    for handle in handles:
        handle.remove()
    return {mask: terms[1:] / terms[0] for mask, terms in sums.items()}


def _add(sums: dict[Tensor, Any], act: Any, args: Any, kwargs: Any) -> None:
    """A hook before an activation's forward: adds the terms of the moments of its input."""
    z = _total(*args, **kwargs).double()
    r = z.relu()
    squares = z * z
    terms = (
        torch.ones_like(z),
        z,
        squares,
        z * squares,
        squares**2,
        r,
        z * r,
        squares * r,
    )
    dims = [0, *range(2, z.ndim)]
    sums[act.mask] = sums.get(act.mask, 0) + torch.stack(
        [term.sum(dims) for term in terms]
    )


def _total(x: Tensor, residual: Tensor | None = None) -> Tensor:
    return x if residual is None else x + residual


def nearest(given: Tensor, share: float) -> Tensor:
    """The quadratic nearest to ReLU with a share of its c2: [7, C] of `moments` -> coef [3, C].

    Without squares it is the line. So it is where z has fewer than three values. Where all z are
    equal, the slope is 1 for z > 0 and 0 otherwise.

    >>> z = torch.tensor([[-1.0, 0.0, 1.0]]).double()
    >>> r = z.relu()
    >>> given = torch.stack([t.mean(1) for t in (z, z**2, z**3, z**4, r, z * r, z * z * r)])
    >>> nearest(given, 0.0).flatten()
    tensor([0.3333, 0.5000, 0.0000], dtype=torch.float64)
    >>> nearest(given, 1.0).flatten()  # (z² + z)/2 is equal to ReLU there
    tensor([0.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    z, squares, cubes, fourths, r, products, second = given
    line = _line(z, squares, r, products, flat=(z > 0).to(z.dtype))
    square = _line(z, squares, squares, cubes, flat=torch.zeros_like(z))
    # What the line leaves of z², and how much of ReLU is in it.
    left = fourths - square[0] * squares - square[1] * cubes
    common = second - square[0] * r - square[1] * products
    none = left <= 1e-9 * fourths
    c2 = share * (common / left.masked_fill(none, 1.0)).masked_fill(none, 0.0)
    return torch.stack([*(line - c2 * square), c2])


def _line(
    z: Tensor, squares: Tensor, t: Tensor, products: Tensor, flat: Tensor
) -> Tensor:
    """The line nearest to t, from E z, E z², E t and E zt; flat: its slope where z is constant."""
    variance = squares - z**2
    none = variance <= 1e-12 * squares
    slope = (products - z * t) / variance.masked_fill(none, 1.0)
    slope = torch.where(none, flat, slope)
    return torch.stack([t - slope * z, slope])


def _replaced(
    net: nn.Module,
    own: nn.Module,
    name: str,
    replaced: tuple[type[MaskedActivation], ...],
    fits: dict[Tensor, Tensor],
) -> nn.Module:
    """A copy of the net, made of the tensors of own; fits: coefficients by the mask of a site."""

    def become(act: MaskedActivation) -> MaskedActivation:
        if not isinstance(act, replaced):
            return act
        new: Any = REPLACEMENTS[name](tuple(act.mask.shape), device=act.mask.device)
        new.mask.copy_(act.mask)
        coef = fits.get(act.mask)
        if isinstance(act, LearnedActivation):  # a line as a quadratic
            coef = torch.cat([act.coef, torch.zeros_like(act.coef[:1])])
        if coef is not None:
            new.coef.data = coef.detach().clone()
        return new.to(dtype_of(net)).train(act.training)

    result = twin(own, become)
    arch = getattr(net, "arch", None)  # a copy of a traced net has none
    if isinstance(arch, dict):
        result.arch = {**arch, "replacement": name}  # type: ignore[assignment]
    return result
