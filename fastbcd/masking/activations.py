"""Masked activations as modules: what `convert` puts into a network, or a user by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd import ops

# The least-squares quadratic of ReLU under a standard Gaussian: c0, c1, c2.
_DENSITY_AT_0 = 1 / math.sqrt(2 * math.pi)
RELU_QUADRATIC = (_DENSITY_AT_0 / 2, 0.5, _DENSITY_AT_0 / 2)


class MaskedActivation(nn.Module):
    """An activation with one bit per neuron, `mask` [*shape]: True = this ReLU is kept."""

    mask: Tensor
    order = 0  # the place in the order of execution, where `convert` found it out

    def __init__(self, shape: tuple[int, ...] | int, *, device: Any = None) -> None:
        super().__init__()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if not shape or min(shape) < 1:
            raise ValueError(
                f"a masked activation needs the shape of one sample, such as (64, 32, 32); got "
                f"{shape}"
            )
        self.register_buffer("mask", torch.ones(shape, dtype=torch.bool, device=device))

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

    def forward(self, x: Tensor) -> Tensor:
        """x [B, *shape] -> [B, *shape]."""
        return ops.masked_relu(x, self.mask, trials=False)


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

    def forward(self, x: Tensor) -> Tensor:
        """x [B, *shape] -> [B, *shape]."""
        return ops.masked_poly(x, self.mask, self.coef, trials=False)


REPLACEMENTS: dict[str, type[MaskedActivation]] = {"identity": MaskedReLU, "poly": MaskedPoly}


def activation_type(replacement: str) -> type[MaskedActivation]:
    """The activation whose cleared bits give `replacement`, "identity" or "poly"."""
    if replacement not in REPLACEMENTS:
        raise ValueError(f"replacement={replacement!r}; choose from {sorted(REPLACEMENTS)}")
    return REPLACEMENTS[replacement]
