"""Every kernel compared with the plain reference, on one device, in seconds.

Elementwise results must be equal to the last bit, sums over batch or trials nearly so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd import ops
from fastbcd.descent import effects
from fastbcd.graph import fuse_norm as normalisation
from fastbcd.graph.fuse_norm import NormActivation
from fastbcd.kernels.geometry import compute_dtype
from fastbcd.masking.activations import MaskedReLU
from fastbcd.ops import reference
from fastbcd.ops.kink import kinks, kinks_reference

# Each op's differentiable arguments; the soft ones take no trials and no scale.
OPS = {
    "masked_relu": ("x", "scale", "shift", "residual"),
    "masked_poly": ("x", "coef", "scale", "shift", "residual"),
    "soft_relu": ("x", "alpha", "residual"),
    "indicator_poly": ("x", "coef", "aux", "residual"),
}


def comparisons(device: str) -> Iterator[tuple[str, list[str]]]:
    """(what was compared, what differs) of every kernel and case."""
    for case in cases(device):
        for op in OPS:
            if op.startswith("masked") or not case["trials"]:
                yield f"{op} {case['label']}", compare(case, op)
        if not case["trials"]:
            yield f"saliency {case['label']}", compare_saliency(case)
    for fresh in (False, True):
        yield f"kinks float32 {'fresh' if fresh else 'added'}", compare_kinks(device, fresh)
    yield "batch norm in train mode, residual and activation", compare_norm(device)


def cases(device: str) -> Iterator[dict[str, Any]]:
    """Arguments of the ops over dtypes, memory orders, trials and optional operands."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    dtypes += [torch.float64] if device == "cpu" else []
    trials_of = {"single": (False, False), "stacked": (True, False), "shared": (True, True)}
    for dtype, last, (name, (trials, shared)), extras in itertools.product(
        dtypes, (False, True), trials_of.items(), (False, True)
    ):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = dtype, g: Any = generator) -> Tensor:
            return torch.randn(shape, generator=g).to(dtype).to(device)

        batch, site, lead = 5, (24, 7, 6), (3,) if trials else ()
        x = draw(*(() if shared else lead), batch, *site)
        residual = draw(*lead, batch, *site) if extras else None
        if last:
            x = x.movedim(-3, -1).contiguous().movedim(-1, -3)
        small = compute_dtype(dtype)
        yield {
            "label": f"{str(dtype)[6:]} {'channels_last' if last else 'contiguous'} {name}"
            + (" scale+residual" if extras else ""),
            "x": x,
            "mask": (torch.rand((*lead, *site), generator=generator) > 0.5).to(device),
            "coef": draw(3, site[0], dtype=small),
            "scale": draw(site[0], dtype=small) if extras else None,
            "shift": draw(site[0], dtype=small) if extras else None,
            "residual": residual,
            "trials": trials,
            "alpha": (units := draw(*site, dtype=small)),
            "aux": units,
        }


def compare(case: dict[str, Any], op: str) -> list[str]:
    """One case through the op and through the reference's formulas; what differs, by name.

    Elementwise results must be equal to the last bit, sums over batch or trials nearly so.
    """
    leaves = {k: case[k].clone().requires_grad_() for k in OPS[op] if case[k] is not None}
    fixed = {"mask": case["mask"]} if op != "soft_relu" else {}
    fixed |= {"trials": case["trials"]} if op.startswith("masked") else {}
    ours = getattr(ops, op)(**fixed, **leaves)
    grad = ours.detach().cos()
    ours.backward(grad)
    found = {"y": ours.detach(), **{f"d{k}": v.grad for k, v in leaves.items()}}
    truth = (_truth if op.startswith("masked") else _soft_truth)(case, grad, op)
    shared = case["trials"] and case["x"].ndim == case["mask"].ndim
    exact = {"y", "dresidual"} | (set() if shared else {"dx"})
    bad = []
    for name, value in found.items():
        same = torch.equal if name in exact else _close
        if not same(value, truth[name]):
            error = (value.double() - truth[name].double()).abs().max().item()
            bad.append(f"{name} differs by {error:.2e}")
    return bad


def _truth(case: dict[str, Any], grad: Tensor, op: str) -> dict[str, Any]:
    x, mask, coef, scale, shift, residual, trials = (
        case[k] for k in ("x", "mask", "coef", "scale", "shift", "residual", "trials")
    )
    if op == "masked_poly":
        y = reference.masked_poly(x, mask, coef, scale, shift, residual, trials)
        dx, dresidual, dcoef, daffine = reference.masked_poly_backward(
            grad, x, mask, coef, scale, shift, residual, trials
        )
    else:
        y = reference.masked_relu(x, mask, scale, shift, residual, trials)
        dcoef = None
        dx, dresidual, daffine = reference.masked_relu_backward(
            grad, y, mask, None if scale is None else x, scale, trials,
            reference.is_shared(x, mask, trials), False,
        )  # fmt: skip
    dscale, dshift = (None, None) if daffine is None else daffine
    return {"y": y, "dx": dx, "dresidual": dresidual, "dcoef": dcoef,
            "dscale": dscale, "dshift": dshift}  # fmt: skip


def _soft_truth(case: dict[str, Any], grad: Tensor, op: str) -> dict[str, Any]:
    x, mask, coef, units, residual = (case[k] for k in ("x", "mask", "coef", "aux", "residual"))
    if op == "soft_relu":
        dx, dalpha = reference.soft_relu_backward(grad, x, units, residual)
        y = reference.soft_relu(x, units, residual)
        return {"y": y, "dx": dx, "dresidual": dx, "dalpha": dalpha}
    dx, dcoef, daux = reference.indicator_poly_backward(grad, x, mask, coef, units, residual)
    y = reference.masked_poly(x, mask, coef, None, None, residual)
    return {"y": y, "dx": dx, "dresidual": dx, "dcoef": dcoef, "daux": daux}


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the order of a sum, in the tensor's own precision."""
    tolerance = 4 * torch.finfo(a.dtype).eps
    scale = b.double().abs().max().clamp(min=1)
    return bool(((a.double() - b.double()).abs() <= max(tolerance, 1e-6) * scale).all())


def compare_saliency(case: dict[str, Any]) -> list[str]:
    """The backward pass that also sums what removals change, of ReLU and of polynomial sites."""
    x, mask, residual = case["x"], case["mask"], case["residual"]
    bad = []
    for coef, absolute in itertools.product((None, case["coef"]), (False, True)):
        arguments = (x.cos(), x, mask, coef, residual, absolute)
        dx, sums = effects.saliency_backward(*arguments)
        true_dx, true_sums = reference.saliency_backward(*arguments)
        if not torch.equal(dx, true_dx) or not _close(sums, true_sums):
            bad.append("poly differs" if coef is not None else "relu differs")
    return bad


def compare_kinks(device: str, fresh: bool) -> list[str]:
    """The kernel of collapsed."""
    generator = torch.Generator().manual_seed(0)
    c, a = (torch.randn(shape, generator=generator).to(device) for shape in ((37, 3, 9), (37, 9)))
    mask = torch.randint(2, (37, 3), dtype=torch.uint8, generator=generator).to(device)
    truth = c.clone()
    kinks(c, a, mask, fresh=fresh)
    kinks_reference(truth, a, mask, fresh)
    return [] if torch.equal(c, truth) else ["c differs"]


def compare_norm(device: str) -> list[str]:
    """act(norm(x) + residual) as one call, where there is one, and as three."""
    generator = torch.Generator().manual_seed(0)
    norm, act = nn.BatchNorm2d(12).to(device), MaskedReLU((12, 5, 7)).to(device)
    act.mask.copy_(torch.rand(12, 5, 7, generator=generator) > 0.5)
    given = torch.randn(2, 9, 12, 5, 7, generator=generator).to(device)
    if not normalisation.fits(norm, act):
        return []
    found = []
    for function in (NormActivation(norm, act), lambda x, residual: act(norm(x) + residual)):
        x, residual = (t.contiguous(memory_format=torch.channels_last) for t in given)
        leaves = [x.requires_grad_(), residual.requires_grad_(), norm.weight, norm.bias]
        y = function(x, residual)
        found.append((y.detach(), *torch.autograd.grad(y.cos().sum(), leaves)))
    names = ("y", "dx", "dresidual", "dweight", "dbias")
    pairs = zip(names, *found, strict=True)
    # The statistics differ in their last bits, and everything after them does.
    same = {n: torch.allclose(ours, truth, rtol=1e-5, atol=1e-5) for n, ours, truth in pairs}
    return [f"{name} differs" for name, ok in same.items() if not ok]
