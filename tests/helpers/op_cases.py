"""Random calls of the masked ops: shapes, memory orders, dtypes, trials, optional operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbcd import ops
from fastbcd.kernels.geometry import compute_dtype, is_shared
from fastbcd.ops import reference

# site shapes for [B,F], [B,L,F], [B,C,H,W], 5-D; odd and even, one channel, one element
SITES = [(1,), (13,), (64,), (5, 7), (3, 5, 4), (16, 8, 8), (1, 6, 5), (7, 1, 1), (4, 3, 2, 5)]
TRIALS = ["single", "stacked", "shared", "shared residual", "both shared"]


class Call(NamedTuple):
    """The arguments of one call, and the same for the reference."""

    x: Tensor
    mask: Tensor
    coef: Tensor
    scale: Tensor | None
    shift: Tensor | None
    residual: Tensor | None
    trials: bool

    def op(self, poly: bool, **changed: Any) -> Tensor:
        a = self._replace(**changed)
        small = {"scale": a.scale, "shift": a.shift, "residual": a.residual, "trials": a.trials}
        if poly:
            return ops.masked_poly(a.x, a.mask, a.coef, **small)
        return ops.masked_relu(a.x, a.mask, **small)

    def truth(self, poly: bool) -> Tensor:
        tail = (self.scale, self.shift, self.residual, self.trials)
        if poly:
            return reference.masked_poly(self.x, self.mask, self.coef, *tail)
        return reference.masked_relu(self.x, self.mask, *tail)

    def truth_grads(self, poly: bool, grad: Tensor) -> dict[str, Tensor | None]:
        """The reference's formulas, by the name of the argument."""
        affine = None if self.scale is None else self.x
        if poly:
            dx, dr, dcoef, da = reference.masked_poly_backward(
                grad, self.x, self.mask, self.coef, self.scale, self.shift, self.residual,
                self.trials,
            )  # fmt: skip
        else:
            dcoef = None
            dx, dr, da = reference.masked_relu_backward(
                grad, self.truth(False), self.mask, affine, self.scale, self.trials,
                self.shared(self.x), self.residual is not None and self.shared(self.residual),
            )  # fmt: skip
        dscale, dshift = (None, None) if da is None else da
        return {"x": dx, "residual": dr, "coef": dcoef, "scale": dscale, "shift": dshift}

    def shared(self, t: Tensor) -> bool:
        return is_shared(t, self.mask, self.trials)

    def leaves(self, poly: bool) -> dict[str, Tensor]:
        """Copies that require a gradient, memory order kept."""
        names = ["x", "scale", "shift", "residual"] + (["coef"] if poly else [])
        given = {n: getattr(self, n) for n in names}
        return {n: t.detach().clone().requires_grad_() for n, t in given.items() if t is not None}


def channels_last(t: Tensor, site_dims: int) -> Tensor:
    """The same values with the channel dimension innermost in memory."""
    c = t.ndim - site_dims
    return t.movedim(c, -1).contiguous().movedim(-1, c)


def sliced(t: Tensor) -> Tensor:
    """The same values as a strided view of something larger."""
    big = t.new_full((*t.shape[:-1], 2 * t.shape[-1] + 1), float("nan"))
    view = big[..., 1::2]
    view.copy_(t)
    return view


def make_call(
    site: tuple[int, ...],
    *,
    batch: int = 3,
    trials: str = "single",
    dtype: torch.dtype = torch.float32,
    order: str = "contiguous",
    mask_order: str = "contiguous",
    affine: bool = True,
    residual: bool = True,
    special: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Call:
    g = torch.Generator().manual_seed(seed)
    lead = () if trials == "single" else (4,)
    small = compute_dtype(dtype)

    def tensor(shared: bool) -> Tensor:
        t = torch.randn((*(() if shared else lead), batch, *site), generator=g, dtype=torch.float64)
        t = t.to(dtype)
        if special and t.numel():
            values = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0])
            at = torch.randint(t.numel(), (t.numel() // 2,), generator=g)
            t.view(-1)[at] = values[torch.randint(5, at.shape, generator=g)].to(dtype)
        if order == "channels_last":
            t = channels_last(t, len(site))
        return (sliced(t) if order == "sliced" else t).to(device)

    mask = torch.rand((*lead, *site), generator=g) > 0.4
    if mask_order == "channels_last":
        mask = channels_last(mask, len(site))
    if mask_order == "uint8":
        mask = mask.to(torch.uint8) * 3  # any nonzero byte keeps

    def by_channel(*rows: int) -> Tensor:
        return torch.randn((*rows, site[0]), generator=g, dtype=small).to(device)

    return Call(
        x=tensor("shared" in trials and trials != "shared residual"),
        mask=mask.to(device),
        coef=by_channel(3),
        scale=by_channel() if affine else None,
        shift=by_channel() if affine else None,
        residual=tensor(trials in ("shared residual", "both shared")) if residual else None,
        trials=bool(lead),
    )


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN equal to NaN; -0.0 and 0.0 count as equal."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )
