"""Masked activations as modules: placed by `convert`, or by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fastbcd.ops.masked import masked, saliency
from fastbcd.runtime.validate import check_choice


class SaliencyPass(NamedTuple):
    """Makes an activation sum the effects of removals in its backward (`ops.masked.saliency`)."""

    anchor: Tensor
    totals: Tensor
    absolute: bool
    copy: (
        bool  # save a copy of each input, for a net that changes it in place afterwards
    )


class MaskedActivation(nn.Module):
    """An activation with one bit per neuron, `mask` [*shape]: True = this ReLU is kept.

    Where the bit is 0, it is the identity, or the line or quadratic of `coefficients`.
    """

    mask: Tensor
    order = 0  # the place in the order of execution, set by `convert`
    # Set for the duration of `fastbcd.saliency`.
    saliency_pass: SaliencyPass | None = None

    def __init__(self, shape: tuple[int, ...] | int, *, device: Any = None) -> None:
        super().__init__()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if not sizes or min(sizes) < 1:
            raise ValueError(
                f"shape={sizes}; give the shape of one sample, such as (64, 32, 32)"
            )
        self.register_buffer("mask", torch.ones(sizes, dtype=torch.bool, device=device))

    def forward(self, x: Tensor, residual: Any = None) -> Tensor:
        """act(x), or act(x + residual) in one pass. x [B, *shape] -> [B, *shape]."""
        if isinstance(x, fx.Proxy):  # one call for any tracer, such as torchvision's
            path = x.tracer.path_of_module(self)
            args = (x,) if residual is None else (x, residual)
            return x.tracer.create_proxy("call_module", path, args, {})
        if torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():
            raise RuntimeError(
                "torch.onnx.export(dynamo=False) has no masked activations: use dynamo=True, or "
                "fastbcd.private.export(net, images, 'net.onnx')"
            )
        if residual is not None:
            like = isinstance(residual, Tensor) and residual.dtype == x.dtype
            if not like or residual.shape != x.shape:
                x = x + residual  # a sum that broadcasts or promotes
                residual = None
        effects = self.saliency_pass
        if effects is None:
            return self.activate(x, residual)
        return saliency(
            x.clone() if effects.copy else x,
            self.mask,
            effects.anchor,
            effects.totals,
            absolute=effects.absolute,
            coef=self.coefficients(),
            residual=residual,
        )

    def coefficients(self) -> Tensor | None:
        """c0, c1 (and c2) of each channel, [2 or 3, C]; None: removed ReLUs are the identity."""
        return None

    def activate(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The activation of x + residual; x and residual have the same shape and dtype."""
        return masked(
            x, self.mask, self.coefficients(), residual=residual, trials=False
        )

    def extra_repr(self) -> str:
        return str(tuple(self.mask.shape))


class LearnedActivation(MaskedActivation):
    """A masked activation whose removed ReLUs are polynomials with the learned `coef` [n, C]."""

    IDENTITY: tuple[float, ...]  # the coefficients at the start, of z**0, z**1, ...

    def __init__(self, shape: tuple[int, ...] | int, *, device: Any = None) -> None:
        super().__init__(shape, device=device)
        start = torch.tensor(self.IDENTITY, device=device).unsqueeze(1)
        self.coef = nn.Parameter(start.repeat(1, self.mask.shape[0]))

    def coefficients(self) -> Tensor:
        """coef, [n, C]."""
        return self.coef


class MaskedReLU(MaskedActivation):
    """ReLU where the bit is 1, identity where it is 0.

    >>> act = MaskedReLU((2,))
    >>> act.mask[1] = False
    >>> act(torch.tensor([[-1.0, -1.0]]))
    tensor([[ 0., -1.]])
    """


class MaskedPoly(LearnedActivation):
    """ReLU where the bit is 1, c2*x² + c1*x + c0 where it is 0, with `coef` [3, C] learned.

    coef starts as the identity: 0, 1, 0. `to_poly` fits it to the ReLUs of a net, with a share of
    the c2 that is nearest to ReLU: with all of it a deep net diverges in training.

    >>> act = MaskedPoly((2,))
    >>> act.mask[1] = False
    >>> act(torch.tensor([[-1.0, 0.0]]))[0, 1].item() == act.coef[0, 1].item()
    True
    """

    IDENTITY = (0.0, 1.0, 0.0)


class MaskedLine(LearnedActivation):
    """ReLU where the bit is 1, c1*x + c0 where it is 0, with `coef` [2, C] learned.

    coef starts as the identity: 0, 1. `to_line` fits it to the ReLUs of a net. A line is as linear
    as the identity: with public coefficients it costs nothing in private inference.

    >>> act = MaskedLine((2,))
    >>> act.coef.data = torch.tensor([[0.5, 0.5], [0.25, 0.25]])
    >>> act.mask[1] = False
    >>> act(torch.tensor([[-1.0, -1.0]])).tolist()
    [[0.0, 0.25]]
    """

    IDENTITY = (0.0, 1.0)


REPLACEMENTS: dict[str, type[MaskedActivation]] = {
    "identity": MaskedReLU,
    "line": MaskedLine,
    "poly": MaskedPoly,
}


def activation_type(replacement: str) -> type[MaskedActivation]:
    """The activation whose cleared bits give `replacement`: "identity", "line" or "poly"."""
    check_choice("replacement", replacement, REPLACEMENTS)
    return REPLACEMENTS[replacement]
