"""to_line: removed ReLUs become lines c1*x + c0, which start as those nearest to ReLU.

The identity is far from ReLU wherever x < 0. The line of least squares is much nearer and is as
linear, so a removal changes less and less training repairs it. Coefficients are those of a channel;
with z its pre-activations over some images and r = relu(z):

    c1 = cov(z, r) / var(z),  c0 = E r - c1·E z
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.masking.activations import MaskedActivation, MaskedLine, MaskedReLU
from fastbcd.masking.masks import mask_modules
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.scoring.accuracy import data_for, dtype_of
from fastbcd.starts.mask_training import twin

IMAGES, BATCH = 512, 64  # that lines are fitted to at most, and at a time


def to_line(net: nn.Module, data: Any) -> nn.Module:
    """A copy of a net with `MaskedLine` in place of `MaskedReLU`: the same weights and masks.

    The lines are fitted to the first images of the data. If no ReLU is removed, the copy computes
    the same as the net.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), fastbcd.MaskedReLU(3))
    >>> lines = to_line(net, (torch.randn(50, 1, 2, 2), torch.arange(50) % 3))
    >>> lines[2], lines[2].coef.shape
    (MaskedLine((3,), 3 kept), torch.Size([2, 3]))
    """
    images, dtype, own = data_for(net, data), dtype_of(net), copy.deepcopy(net)
    sums = dict[Tensor, Tensor]()  # by the mask of the site, which `twin` shares
    hooks = [act.register_forward_pre_hook(partial(_add, sums), with_kwargs=True)
             for act in mask_modules(own).values()]  # fmt: skip
    with eval_mode(own), torch.no_grad():
        for x, _ in images.first(min(IMAGES, len(images))).batches(BATCH, dtype=dtype):
            own(x)
    for hook in hooks:
        hook.remove()

    def line(act: MaskedActivation) -> MaskedActivation:
        if not isinstance(act, MaskedReLU):
            return act
        new = MaskedLine(tuple(act.mask.shape), device=act.mask.device).to(dtype)
        new.mask.copy_(act.mask)
        if act.mask in sums:  # else its activation is never called
            new.coef.data.copy_(least_squares(*sums[act.mask]))
        return new.train(act.training)

    result = twin(own, line)
    if isinstance(arch := getattr(net, "arch", None), dict):  # a copy of a traced net has none
        result.arch = {**arch, "replacement": "line"}  # type: ignore[assignment]
    return result


def least_squares(count: Tensor, z: Tensor, squares: Tensor, r: Tensor, products: Tensor) -> Tensor:
    """The line nearest to ReLU, from sums by channel, [C] each -> coef [2, C]: c0, c1.

    Where all z are equal, the slope is 1 for z > 0 and 0 otherwise.

    >>> z = torch.tensor([[-1.0, 0.0, 1.0]]).double()
    >>> r = z.relu()
    >>> least_squares(*(s.sum(1) for s in (z * 0 + 1, z, z * z, r, z * r))).flatten()
    tensor([0.3333, 0.5000], dtype=torch.float64)
    """
    mean, height = z / count, r / count
    variance = squares / count - mean**2
    flat = variance <= 1e-12 * squares / count
    slope = (products / count - mean * height) / variance.masked_fill(flat, 1.0)
    slope = torch.where(flat, (mean > 0).to(slope.dtype), slope)
    return torch.stack([height - slope * mean, slope])


def _add(sums: dict[Tensor, Tensor], act: Any, args: tuple[Tensor, ...], kwargs: Any) -> None:
    """A hook before an activation's forward: adds its inputs to the sums of `least_squares`."""
    x, residual = args[0], args[1] if len(args) > 1 else kwargs.get("residual")
    z = (x if residual is None else x + residual).double()
    r, dims = z.relu(), [d for d in range(z.ndim) if d != 1]
    new = torch.stack([t.sum(dims) for t in (torch.ones_like(z), z, z * z, r, z * r)])
    sums[act.mask] = sums[act.mask] + new if act.mask in sums else new
