"""The backward pass of the masked activations, with the effect of every removal on the way.

    y = collect(x, mask, anchor, totals, absolute=True)      # a masked ReLU that takes notes
    loss.backward()                                          # totals += sum over the batch

Removing the ReLU of a kept unit adds min(z, 0) to its output (poly(z) - relu(z) at a polynomial
site), which changes the loss by grad * min(z, 0) to first order. Where z < 0 the output is 0 and
does not tell z, so the input (and the residual) is kept for the backward pass instead of the
output: the same memory, and nothing is computed twice.

The operator `fastbcd::saliency_backward` is built like those of `ops.py`: dense memory, a C++ or
a Triton kernel, or `reference.py`; one pass over grad and x, a fixed order of summation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbcd import kernels, ops
from fastbcd.kernels.geometry import compute_dtype, dense, geometry, item_order
from fastbcd.ops import reference


def collect(
    x: Tensor,
    mask: Tensor,
    anchor: Tensor,
    totals: Tensor,
    *,
    absolute: bool,
    coef: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`masked_relu`, or `masked_poly` if there is coef, whose backward adds to `totals`.

    Args:
        x: [B, *S]. mask: [*S]. coef: [3, C]. residual: shaped like x.
        anchor: any tensor that requires a gradient, which it never gets: it makes autograd come
            by even where nothing before this activation has a gradient.
        totals: DoubleTensor[*S]; the backward adds the sum over the batch of grad * added, or of
            |grad * added| if absolute, for kept units.

    >>> x, totals = torch.tensor([[-2.0, -3.0, 4.0]]), torch.zeros(3, dtype=torch.float64)
    >>> mask, anchor = torch.tensor([True, False, True]), torch.zeros((), requires_grad=True)
    >>> collect(x, mask, anchor, totals, absolute=True).sum().backward()
    >>> totals
    tensor([2., 0., 0.], dtype=torch.float64)
    """
    small = None if coef is None else coef.detach().to(compute_dtype(x.dtype))
    return _Collect.apply(anchor, x, residual, mask, small, totals, absolute)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        residual: Tensor | None,
        mask: Tensor,
        coef: Tensor | None,
        totals: Tensor,
        absolute: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, residual, mask, coef)
        ctx.totals, ctx.absolute = totals, absolute
        if coef is None:
            return ops.masked_relu(x, mask, residual=residual, trials=False)
        return ops.masked_poly(x, mask, coef, residual=residual, trials=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, residual, mask, coef = ctx.saved_tensors
        dx, sums = saliency_backward(grad, x, mask, coef, residual, ctx.absolute)
        ctx.totals += sums
        # dz goes to x and to the residual: one tensor serves both.
        return None, dx, dx if ctx.needs_input_grad[2] else None, None, None, None, None


# -------------------------------------------------------------------------------- operator

_library = torch.library.Library("fastbcd", "FRAGMENT")
_library.define(
    "saliency_backward(Tensor grad, Tensor x, Tensor mask, Tensor? coef, Tensor? residual, "
    "bool absolute) -> (Tensor dx, Tensor sums)"
)


def _outputs(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """dx [B, *S] and zero sums [*S] in the memory order of dense x."""
    sums = x.new_zeros(mask.shape, dtype=compute_dtype(x.dtype))
    return torch.empty_like(x), dense(sums, 0, item_order(x, 1))


def _saliency_backward(grad, x, mask, coef, residual, absolute) -> tuple[Tensor, Tensor]:
    x, mask, kernel = dense(x, 1), dense(mask, 0), kernels.choose(x)
    last = item_order(x, 1)
    grad = dense(grad, 1, last)
    residual = None if residual is None else dense(residual, 1, last)
    coef = None if coef is None else coef.contiguous()
    dx, sums = _outputs(x, mask)
    if kernel is None:
        found = reference.saliency_backward(grad, x, mask, coef, residual, absolute)
        dx.copy_(found[0])
        sums.copy_(found[1])
    elif x.numel():
        g = geometry(x, mask, None, False)
        kernel.saliency_backward(dx, sums, grad, x, mask, coef, residual, absolute, g)
    return dx, sums


_library.impl("saliency_backward", _saliency_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fastbcd::saliency_backward",
    lambda grad, x, mask, *rest: _outputs(dense(x, 1), mask),
    lib=_library,
)
saliency_backward = torch.ops.fastbcd.saliency_backward.default
