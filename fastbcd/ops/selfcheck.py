"""Every op compared with its reference on one device, forward and backward, in seconds.

A `Case` names an op and everything that selects other code: dtype, memory orders, trials, optional
arguments, sizes. Elementwise results must be equal to the last bit, sums over the batch nearly so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fastbcd.kernels.geometry import compute_dtype, is_shared
from fastbcd.ops import reference
from fastbcd.ops.kink import kink
from fastbcd.ops.masked import masked_poly, masked_relu
from fastbcd.ops.norm import norm_relu
from fastbcd.ops.saliency import saliency_backward
from fastbcd.ops.soft import indicator_poly, soft_relu

# The differentiable arguments of each op.
OPS = {
    "masked_relu": ("x", "scale", "shift", "residual"),
    "masked_poly": ("x", "coef", "scale", "shift", "residual"),
    "soft_relu": ("x", "alpha", "residual"),
    "indicator_poly": ("x", "coef", "aux", "residual"),
    "norm_relu": ("x", "weight", "bias", "residual"),
}
# The arguments of reference.<op> and of reference.<op>_backward, and the results of the latter.
FORMULAS = {
    "masked_relu": (
        "x mask scale shift residual trials",
        "grad y mask x_if_affine scale trials x_shared residual_shared",
        "dx dresidual daffine",
    ),
    "masked_poly": (
        "x mask coef scale shift residual trials",
        "grad x mask coef scale shift residual trials",
        "dx dresidual dcoef daffine",
    ),
    "soft_relu": ("x alpha residual", "grad x alpha residual", "dx dalpha"),
    "indicator_poly": (
        "x mask coef aux residual", "grad x mask coef residual", "dx dcoef dmask",
    ),
    "norm_relu": (
        "x weight bias mask residual eps",
        "grad y x weight mask statistics eps",
        "dx dresidual dparameters",
    ),
}  # fmt: skip
SALIENCY = ("saliency", "saliency_poly")  # of a masked ReLU, absolute; of a polynomial, signed
TRIALS = ("none", "stacked", "shared x", "shared residual", "both shared")
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 6e4)


class Case(NamedTuple):
    """One call. `sizes` are T, B, C and the spatial sizes."""

    op: str
    dtype: str = "float32"
    trials: str = "none"
    order: str = "contiguous"  # of x, residual and grad: or channels_last, or sliced
    mask_order: str = "contiguous"  # or channels_last
    affine: bool = False
    residual: bool = False
    sizes: tuple[int, ...] = (3, 5, 24, 7, 6)
    special: bool = False  # channel 0 of x has NaN, infinities, zeros and a large number
    frozen: bool = False  # only x requires a gradient

    @property
    def stacked(self) -> bool:
        return self.trials != "none"

    def __str__(self) -> str:
        words = [self.op, self.dtype, self.trials.replace(" ", "_"), self.order]
        words += [f"mask_{self.mask_order}"] * (self.mask_order != self.order)
        words += ["affine"] * self.affine + ["residual"] * self.residual
        words += ["special"] * self.special + ["frozen"] * self.frozen
        return "-".join([*words, "x".join(map(str, self.sizes))])


def comparisons(device: str) -> Iterator[tuple[str, list[str]]]:
    """(what was compared, what differs) for every kernel of `fastbcd info --check`."""
    dtypes = ["float32", "float16", "bfloat16"] + ["float64"] * (device == "cpu")
    orders = ("contiguous", "channels_last")
    for order, residual in product(orders, (False, True)):
        case = Case("norm_relu", order=order, residual=residual)
        yield str(case), compare(case, device)
    for fresh in (False, True):
        yield f"kink {'fresh' if fresh else 'added'}", compare_kink(device, fresh)
    for dtype, order, extras in product(dtypes, orders, (False, True)):
        for op, trials in product(("masked_relu", "masked_poly"), TRIALS[: 5 if extras else 3]):
            case = Case(op, dtype, trials, order, affine=extras, residual=extras)
            yield str(case), compare(case, device)
        for op in ("soft_relu", "indicator_poly", *SALIENCY):
            case = Case(op, dtype, order=order, residual=extras)
            yield str(case), compare(case, device)


def compare(case: Case, device: str = "cpu", seed: int = 0, ulps: int = 0) -> list[str]:
    """The differences between an op and its reference, forward and backward."""
    given = arguments(case, device, seed)
    return disagreement(case, given, results(case, given), ulps)


def disagreement(
    case: Case, given: dict[str, Any], found: dict[str, Tensor], ulps: int = 0
) -> list[str]:  # fmt: skip
    """How the results `found` of an op differ from those of the reference."""
    wanted = expected(case, given, found)
    return differences(found, wanted, ulps, sums_only=case.op == "norm_relu")


def arguments(case: Case, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """The arguments of a case, by name, and `grad`, that of its output."""
    g = torch.Generator().manual_seed(seed)
    trials, batch, *site = case.sizes
    lead = [trials] if case.stacked else []
    dtype = getattr(torch, case.dtype)
    small = compute_dtype(dtype)

    def draw(*shape: int, dtype: torch.dtype = small) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    def items(shared: bool = False, special: bool = case.special) -> Tensor:
        t = draw(*([] if shared else lead), batch, *site, dtype=dtype)
        if special and t.numel():
            first = t.select(t.ndim - len(site), 0)
            which = torch.randint(2 * len(SPECIAL), first.shape, generator=g)
            values = torch.tensor(SPECIAL)[which % len(SPECIAL)].to(dtype)
            first.copy_(torch.where(which < len(SPECIAL), values, first))
        return ordered(t, len(site), case.order)

    bits = torch.randint(4, (*lead, *site), generator=g)
    # Both dtypes of a mask; any byte but 0 keeps the ReLU.
    mask = bits > 1 if case.dtype == "float32" else torch.tensor([0, 0, 1, 255])[bits].byte()
    given: dict[str, Any] = {
        "x": items(case.trials in ("shared x", "both shared")),
        "mask": ordered(mask, len(site), case.mask_order),
        "coef": draw(3, site[0]),
        "scale": draw(site[0]) if case.affine else None,
        "shift": draw(site[0]) if case.affine else None,
        "residual": items(case.trials in ("shared residual", "both shared"))
        if case.residual else None,
        "alpha": ordered(draw(*site), len(site), case.order),
        "aux": ordered(draw(*site), len(site), case.mask_order),
        "weight": draw(site[0]),
        "bias": draw(site[0]),
        "grad": items(special=False),
    }  # fmt: skip
    return {n: None if t is None else move(t, device) for n, t in given.items()}


def move(t: Tensor, device: str) -> Tensor:
    """t on the device; its strides are kept."""
    if t.device.type == torch.device(device).type:
        return t
    storage = t.new_empty(0).set_(t.untyped_storage()).to(device)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def ordered(t: Tensor, site_dims: int, order: str) -> Tensor:
    """The same values in another memory order; "sliced": a view of something larger."""
    if order == "sliced":
        big = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1] + 1))
        view = big[..., 1::2]
        view.copy_(t)
        return view
    c = t.ndim - site_dims
    last = order == "channels_last"
    return t.movedim(c, -1).contiguous().movedim(-1, c) if last else t.contiguous()


def function_of(case: Case, given: dict[str, Any]) -> Callable[..., Any]:
    """The op of a case as a function of its differentiable arguments."""
    mask = given["mask"]
    functions: dict[str, Callable[..., Any]] = {
        "masked_relu": partial(masked_relu, mask=mask, trials=case.stacked),
        "masked_poly": partial(masked_poly, mask=mask, trials=case.stacked),
        "soft_relu": soft_relu,
        "indicator_poly": partial(indicator_poly, mask=mask),
        "norm_relu": lambda **a: norm_relu(mask=mask, **a)[0],
    }
    return functions[case.op]


def leaves(case: Case, given: dict[str, Any]) -> dict[str, Tensor]:
    """The differentiable arguments that are given, as leaves; strides are kept."""
    names = [n for n in OPS[case.op] if given[n] is not None]
    return {n: given[n].detach().requires_grad_(n == "x" or not case.frozen) for n in names}


def results(case: Case, given: dict[str, Any]) -> dict[str, Tensor]:
    """y and the gradients "dx", ... by the op and autograd."""
    if case.op in SALIENCY:
        dx, sums = saliency_backward(*_saliency_arguments(case, given))
        return {"dx": dx, "sums": sums}
    inputs = leaves(case, given)
    y = function_of(case, given)(**inputs)
    wanted = {n: t for n, t in inputs.items() if t.requires_grad}
    grads = torch.autograd.grad(y, list(wanted.values()), given["grad"].expand_as(y))
    return {"y": y.detach(), **{f"d{n}": d for n, d in zip(wanted, grads, strict=True)}}


def _saliency_arguments(case: Case, given: dict[str, Any]) -> tuple:
    poly = case.op == "saliency_poly"
    coef = given["coef"] if poly else None
    return given["grad"], given["x"], given["mask"], coef, given["residual"], not poly


def expected(case: Case, given: dict[str, Any], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same by the reference. The ReLU's backward reads `found["y"]`, as the op does."""
    if case.op in SALIENCY:
        dx, sums = reference.saliency_backward(*_saliency_arguments(case, given))
        return {"dx": dx, "sums": sums}
    x, mask, residual = given["x"], given["mask"], given["residual"]
    values = {
        **given, "y": found["y"], "grad": given["grad"].expand_as(found["y"]),
        "trials": case.stacked, "x_shared": is_shared(x, mask, case.stacked),
        "residual_shared": residual is not None and is_shared(residual, mask, case.stacked),
        "x_if_affine": x if case.affine else None, "eps": 1e-5,
    }  # fmt: skip
    inputs, backward_inputs, outputs = (names.split() for names in FORMULAS[case.op])
    y = getattr(reference, case.op)(*(values[n] for n in inputs))
    if case.op == "norm_relu":
        y, values["statistics"] = y
    backward = getattr(reference, f"{case.op}_backward")
    gradients = backward(*(values[n] for n in backward_inputs))
    truth: dict[str, Any] = dict(zip(outputs, gradients, strict=True))
    truth = {"y": y, "dresidual": truth["dx"], **truth}
    for both, names in (("daffine", ("dscale", "dshift")), ("dparameters", ("dweight", "dbias"))):
        if truth.get(both) is not None:
            truth |= dict(zip(names, truth[both], strict=True))
    if "dmask" in truth:
        truth["daux"] = softplus(given["aux"]) * truth["dmask"]
    return {name: truth[name] for name in found}


def differences(
    found: dict[str, Tensor], wanted: dict[str, Tensor], ulps: int = 0, sums_only: bool = False
) -> list[str]:
    """How results differ: elementwise ones to the bit (or `ulps` in bf16), sums to rounding.

    sums_only: every result depends on sums, as in a batch norm.
    """
    lines = []
    for name, want in wanted.items():
        got = found[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            lines.append(f"{name} is {got.dtype} {tuple(got.shape)}, not {tuple(want.shape)}")
            continue
        same = (got == want) | (got.isnan() & want.isnan())
        if sums_only or name not in ("y", "dx", "dresidual"):
            channel = 0 if name in ("dalpha", "daux", "sums") or want.ndim == 1 else 1
            same |= _near(got.movedim(channel, 0), want.movedim(channel, 0)).movedim(0, channel)
        elif ulps and want.dtype == torch.bfloat16:
            same |= ~(got.isnan() | want.isnan()) & (_steps(got, want) <= ulps)
        if not same.all():
            at = tuple((~same).nonzero()[0].tolist())
            lines.append(
                f"{name}: {(~same).sum().item()} of {same.numel()} differ, "
                f"first at {at}: {got[at].item()!r}, expected {want[at].item()!r}"
            )
    return lines


def _near(got: Tensor, want: Tensor) -> Tensor:
    """[C, ...] equal up to the order of a sum. Channel 0 may have values of any size."""
    tolerance = 128 * torch.finfo(want.dtype).eps
    size = want.nan_to_num(0, 0, 0).abs().flatten(1) if want.ndim > 1 else want.abs()[:, None]
    size = size.nan_to_num(0, 0, 0)
    largest = size.amax(1, keepdim=True) if size.shape[1] else size.new_zeros(len(size), 1)
    if len(size) > 1:
        largest[1:] = largest[1:].amax()
    largest = largest.reshape(-1, *(1,) * (want.ndim - 1))
    return (got - want).abs() <= tolerance * (1 + largest)


def _steps(a: Tensor, b: Tensor) -> Tensor:
    """How many bf16 numbers lie between."""
    a, b = (t.contiguous().view(torch.int16).int() for t in (a, b))
    a, b = (torch.where(t < 0, -(t & 0x7FFF), t) for t in (a, b))
    return (a - b).abs()


def compare_kink(device: str, fresh: bool, sizes: tuple[int, int, int] = (37, 3, 9)) -> list[str]:
    """The kernel of collapsed, on slices of larger tensors."""
    n, trials, batch = sizes
    g = torch.Generator().manual_seed(0)
    table = torch.randn(n + 7, trials, batch, generator=g)
    table[3, 0, 0] = 0.0 if fresh else math.nan
    a = torch.randn(n + 2, batch, generator=g).to(device)[1 : n + 1]
    mask = torch.randint(2, (n + 3, trials), dtype=torch.uint8, generator=g).to(device)[2 : n + 2]
    found, truth = table.to(device, copy=True), table.to(device, copy=True)
    kink(found[3 : n + 3], a, mask, fresh=fresh)
    truth[3 : n + 3] = reference.kink(truth[3 : n + 3], a, mask, fresh)
    return differences({"y": found}, {"y": truth})
