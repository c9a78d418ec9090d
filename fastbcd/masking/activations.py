"""Masked activations as modules: placed by `convert`, or by hand."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from fastbcd import ops
from fastbcd.ops.saliency import saliency

# The least-squares quadratic of ReLU under a standard Gaussian: c0, c1, c2.
_DENSITY_AT_0 = 1 / math.sqrt(2 * math.pi)
RELU_QUADRATIC = (_DENSITY_AT_0 / 2, 0.5, _DENSITY_AT_0 / 2)


class SaliencyPass(NamedTuple):
    """Makes an activation sum the effects of removals in its backward (`ops.saliency`)."""

    anchor: Tensor
    totals: Tensor
    absolute: bool
    copy: bool  # save a copy of each input, for a net that changes it in place afterwards


class MaskedActivation(nn.Module):
    """An activation with one bit per neuron, `mask` [*shape]: True = this ReLU is kept."""

    mask: Tensor
    order = 0  # the place in the order of execution, set by `convert`
    saliency_pass: SaliencyPass | None = None  # set for the duration of `fastbcd.saliency`

    def __init__(self, shape: tuple[int, ...] | int, *, device: Any = None) -> None:
        super().__init__()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if not shape or min(shape) < 1:
            raise ValueError(
                f"a masked activation needs the shape of one sample, such as (64, 32, 32); got "
                f"{shape}"
            )
        self.register_buffer("mask", torch.ones(shape, dtype=torch.bool, device=device))

    def forward(self, x: Tensor, residual: Any = None) -> Tensor:
        """act(x), or act(x + residual) in one pass. x [B, *shape] -> [B, *shape]."""
        if residual is not None and not _alike(x, residual):
            x, residual = x + residual, None
        if self.saliency_pass is None:
            return self.activate(x, residual)
        anchor, totals, absolute, copy = self.saliency_pass
        return saliency(
            x.clone() if copy else x, self.mask, anchor, totals, absolute=absolute,
            coef=getattr(self, "coef", None), residual=residual,
        )  # fmt: skip

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual; x and residual have the same shape and dtype."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        kept = "" if self.mask.is_meta else f", {int(self.mask.sum()):,} kept"
        return f"{tuple(self.mask.shape)}{kept}"


class MaskedReLU(MaskedActivation):
    """ReLU where the bit is 1, identity where it is 0.

    >>> act = MaskedReLU((2,))
    >>> act.mask[1] = False
    >>> act(torch.tensor([[-1.0, -1.0]]))
    tensor([[ 0., -1.]])
    """

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual, [B, *shape]."""
        return ops.masked_relu(x, self.mask, residual=residual, trials=False)


class MaskedPoly(MaskedActivation):
    """ReLU where the bit is 1, c2*x² + c1*x + c0 where it is 0, with `coef` [3, C] learned.

    coef starts as the quadratic nearest to ReLU for x ~ N(0, 1).

    >>> act = MaskedPoly((2,))
    >>> act.mask[1] = False
    >>> act(torch.tensor([[-1.0, 0.0]]))[0, 1].item() == act.coef[0, 1].item()
    True
    """

    def __init__(self, shape: tuple[int, ...] | int, *, device: Any = None) -> None:
        super().__init__(shape, device=device)
        start = torch.tensor(RELU_QUADRATIC, device=device).unsqueeze(1)
        self.coef = nn.Parameter(start.repeat(1, self.mask.shape[0]))

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual, [B, *shape]."""
        return ops.masked_poly(x, self.mask, self.coef, residual=residual, trials=False)


def _alike(x: Any, residual: Any) -> bool:
    """Can the two be added without broadcasting or promotion?"""
    return (
        isinstance(x, Tensor)
        and isinstance(residual, Tensor)
        and x.shape == residual.shape
        and x.dtype == residual.dtype
    )


REPLACEMENTS: dict[str, type[MaskedActivation]] = {"identity": MaskedReLU, "poly": MaskedPoly}


def activation_type(replacement: str) -> type[MaskedActivation]:
    """The activation whose cleared bits give `replacement`, "identity" or "poly"."""
    if replacement not in REPLACEMENTS:
        raise ValueError(f"replacement={replacement!r}; choose from {sorted(REPLACEMENTS)}")
    return REPLACEMENTS[replacement]


def _copy_masks_instead_of_averaging() -> None:
    """Make AveragedModel(net, use_buffers=True) copy masks.

    torch averages all buffers, and a bit of 0.9·True + 0.1·False is True again. AveragedModel has
    no hook, so its method is wrapped; models without masks are averaged as before.
    """
    original = AveragedModel.update_parameters

    @functools.wraps(original)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        if not any(isinstance(m, MaskedActivation) for m in self.modules()):
            return original(self, model)
        given = self.avg_fn, self.multi_avg_fn
        one: Any = given[0] if any(given) else get_swa_avg_fn()
        many: Any = given[1]

        def average_one(averaged: Tensor, new: Tensor, n: Any) -> Tensor:
            return new if new.dtype is torch.bool else one(averaged, new, n)

        def average_many(averaged: Any, new: Any, n: Any) -> None:  # tensors of one dtype
            if new[0].dtype is torch.bool:
                torch._foreach_copy_(averaged, new)
            else:
                many(averaged, new, n)

        self.avg_fn, self.multi_avg_fn = one and average_one, many and average_many
        try:
            original(self, model)
        finally:
            self.avg_fn, self.multi_avg_fn = given

    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


_copy_masks_instead_of_averaging()
