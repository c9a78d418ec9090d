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
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.data.for_net import data_for
from fastbcd.masking.activations import MaskedActivation, MaskedLine, MaskedPoly, MaskedReLU
from fastbcd.masking.masks import mask_modules
from fastbcd.masking.twin import twin
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.module_mode import eval_mode

IMAGES, BATCH = 512, 64  # that lines and quadratics are fitted to at most, and at a time
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
    (MaskedLine((3,), 3 kept), torch.Size([2, 3]))
    """
    own = copy.deepcopy(net)
    found = moments(own, data)

    def replace(act: MaskedActivation) -> MaskedActivation:
        if not isinstance(act, MaskedReLU):
            return act
        return _become(MaskedLine, act, line(found[act.mask]) if act.mask in found else None)

    return _replaced(net, own, replace, "line")


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
    (MaskedPoly((3,), 3 kept), True)
    """
    own = copy.deepcopy(net)
    found = {} if data is None else moments(own, data)

    def replace(act: MaskedActivation) -> MaskedActivation:
        if isinstance(act, MaskedPoly):
            return act
        coef = act.coefficients()  # of a line
        if coef is None and act.mask in found:
            coef = quadratic(found[act.mask])
        return _become(MaskedPoly, act, coef)

    return _replaced(net, own, replace, "poly")


def moments(net: nn.Module, data: Any) -> dict[Tensor, Tensor]:
    """E z, E z², E z³, E z⁴, E r, E zr, E z²r over the first images: [7, C] by a site's mask."""
    images, sums = data_for(net, data), dict[Tensor, Tensor]()
    hooks = [act.register_forward_pre_hook(partial(_add, sums), with_kwargs=True)
             for act in mask_modules(net).values()]  # fmt: skip
    with eval_mode(net), torch.no_grad():
        for x, _ in images.first(min(IMAGES, len(images))).batches(BATCH, dtype=dtype_of(net)):
            net(x)
    for hook in hooks:
        hook.remove()
    return {mask: terms[1:] / terms[0] for mask, terms in sums.items()}


def _add(sums: dict[Tensor, Tensor], act: Any, args: tuple[Tensor, ...], kwargs: Any) -> None:
    """A hook before an activation's forward: adds the terms of the moments of its input."""
    x, residual = args[0], args[1] if len(args) > 1 else kwargs.get("residual")
    z = (x if residual is None else x + residual).double()
    r, squares, dims = z.relu(), z * z, [d for d in range(z.ndim) if d != 1]
    terms = (torch.ones_like(z), z, squares, z * squares, squares**2, r, z * r, squares * r)
    new = torch.stack([term.sum(dims) for term in terms])
    sums[act.mask] = sums[act.mask] + new if act.mask in sums else new


def line(given: Tensor) -> Tensor:
    """The line nearest to ReLU by channel, from `moments`, [7, C] -> coef [2, C]: c0, c1.

    Where all z are equal, the slope is 1 for z > 0 and 0 otherwise.

    >>> z = torch.tensor([[-1.0, 0.0, 1.0]]).double()
    >>> r = z.relu()
    >>> line(torch.stack([t.mean(1) for t in (z, z**2, z**3, z**4, r, z * r, z * z * r)])).flatten()
    tensor([0.3333, 0.5000], dtype=torch.float64)
    """
    z, squares, _, _, r, products, _ = given
    return _line(z, squares, r, products, flat=(z > 0).to(z.dtype))


def quadratic(given: Tensor, share: float = SQUARES) -> Tensor:
    """The quadratic nearest to ReLU with a share of its c2, [7, C] -> coef [3, C]: c0, c1, c2.

    Where z has fewer than three values, it is the line.

    >>> z = torch.tensor([[-1.0, 0.0, 1.0]]).double()
    >>> r = z.relu()
    >>> given = torch.stack([t.mean(1) for t in (z, z**2, z**3, z**4, r, z * r, z * z * r)])
    >>> quadratic(given, share=1.0).flatten()  # (z² + z)/2 is equal to ReLU there
    tensor([0.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    z, squares, cubes, fourths, r, products, second = given
    (c0, c1), (d0, d1) = line(given), _line(z, squares, squares, cubes, flat=torch.zeros_like(z))
    # What a line leaves of z², and how much of ReLU is in it.
    rest, common = fourths - d0 * squares - d1 * cubes, second - d0 * r - d1 * products
    none = rest <= 1e-9 * fourths
    c2 = share * (common / rest.masked_fill(none, 1.0)).masked_fill(none, 0.0)
    return torch.stack([c0 - c2 * d0, c1 - c2 * d1, c2])


def _line(z: Tensor, squares: Tensor, t: Tensor, products: Tensor, flat: Tensor) -> Tensor:
    """The line nearest to t, from E z, E z², E t and E zt; flat: its slope where z is constant."""
    variance = squares - z**2
    none = variance <= 1e-12 * squares
    slope = (products - z * t) / variance.masked_fill(none, 1.0)
    slope = torch.where(none, flat, slope)
    return torch.stack([t - slope * z, slope])


def _become(
    kind: type[MaskedLine | MaskedPoly], act: MaskedActivation, coef: Tensor | None
) -> MaskedActivation:
    """An activation of another kind with the same mask; without coef it starts as the identity."""
    new = kind(tuple(act.mask.shape), device=act.mask.device)
    new.mask.copy_(act.mask)
    if coef is not None:
        new.coef.data = coef.detach().clone()
    return new.train(act.training)


def _replaced(
    net: nn.Module, own: nn.Module, replace: Callable[[Any], MaskedActivation], replacement: str
) -> nn.Module:
    """A copy of the net, made of the tensors of own, with its activations replaced."""
    dtype = dtype_of(net)

    def typed(act: MaskedActivation) -> MaskedActivation:
        new = replace(act)
        return new if new is act else new.to(dtype)

    result = twin(own, typed)
    if isinstance(arch := getattr(net, "arch", None), dict):  # a copy of a traced net has none
        result.arch = {**arch, "replacement": replacement}  # type: ignore[assignment]
    return result
