"""The calls of the ops that tests share: random arguments, results, and the reference's results.

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

from fastbcd.kernels.geometry import compute_dtype
from fastbcd.ops import reference
from fastbcd.ops.kink import kink
from fastbcd.ops.masked import (
    indicator_poly,
    masked_line,
    masked_poly,
    masked_relu,
    saliency,
    soft_relu,
)
from fastbcd.ops.selfcheck import ELEMENTWISE, TRIALS
from fastbcd.ops.selfcheck import differences as library_differences

# The differentiable arguments of each op.
OPS = {
    "masked_relu": ("x", "scale", "shift", "residual"),
    "masked_line": ("x", "coef", "scale", "shift", "residual"),
    "masked_poly": ("x", "coef", "scale", "shift", "residual"),
    "soft_relu": ("x", "alpha", "residual"),
    "indicator_poly": ("x", "coef", "aux", "residual"),
    "saliency": ("x", "residual"),
    "saliency_line": ("x", "residual"),
    "saliency_poly": ("x", "residual"),
}
SALIENCY = ("saliency", "saliency_line", "saliency_poly")  # signed for the quadratic
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 6e4)


MASKED = ("masked_relu", "masked_line", "masked_poly")
UNSTACKED = ("soft_relu", "indicator_poly", *SALIENCY)  # without trials and affine
DIFFERENTIABLE = (*MASKED, "soft_relu", "indicator_poly")
ORDERS = ("contiguous", "channels_last", "sliced")
TINY = (2, 2, 5, 3, 3)
# Site shapes for [B, F], [B, L, F], [B, C, H, W] and 5-D; odd, even, one channel, one element.
SITES = [(1,), (13,), (64,), (5, 7), (3, 5, 4), (16, 8, 8), (1, 6, 5), (7, 1, 1), (4, 3, 2, 5)]


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


def compare(case: Case, device: str = "cpu", seed: int = 0, ulps: int = 0) -> list[str]:
    """The differences between an op and its reference, forward and backward."""
    given = arguments(case, device, seed)
    return disagreement(case, given, results(case, given), ulps)


def disagreement(
    case: Case, given: dict[str, Any], found: dict[str, Tensor], ulps: int = 0
) -> list[str]:  # fmt: skip
    """How the results `found` of an op differ from those of the reference."""
    wanted = expected(case, given, found)
    terms = math.prod(case.sizes) / max(case.sizes[2], 1)  # of a sum; their rounding errors add up
    return differences(found, wanted, ulps, rounding=16 * max(8, terms**0.5))


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
        "coef": draw(3, site[0])[: rows(case.op)] if rows(case.op) else None,
        "scale": draw(site[0]) if case.affine else None,
        "shift": draw(site[0]) if case.affine else None,
        "residual": items(case.trials in ("shared residual", "both shared"))
        if case.residual else None,
        "alpha": ordered(draw(*site), len(site), case.order),
        "aux": ordered(draw(*site), len(site), case.mask_order),
        "grad": items(special=False),
    }  # fmt: skip
    return {n: None if t is None else move(t, device) for n, t in given.items()}


def rows(op: str) -> int:
    """How many rows the coefficients of an op have."""
    return 2 if op.endswith("line") else 3 if op.endswith("poly") else 0


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
        "masked_line": partial(masked_line, mask=mask, trials=case.stacked),
        "masked_poly": partial(masked_poly, mask=mask, trials=case.stacked),
        "soft_relu": soft_relu,
        "indicator_poly": partial(indicator_poly, mask=mask),
    }
    return functions[case.op]


def leaves(case: Case, given: dict[str, Any]) -> dict[str, Tensor]:
    """The differentiable arguments that are given, as leaves; strides are kept."""
    names = [n for n in OPS[case.op] if given[n] is not None]
    return {n: given[n].detach().requires_grad_(n == "x" or not case.frozen) for n in names}


def results(case: Case, given: dict[str, Any]) -> dict[str, Tensor]:
    """y and the gradients "dx", ... by the op and autograd."""
    inputs = leaves(case, given)
    wanted = {n: t for n, t in inputs.items() if t.requires_grad}
    if case.op in SALIENCY:
        return saliency_results(case, given, inputs)
    y = function_of(case, given)(**inputs)
    grads = torch.autograd.grad(y, list(wanted.values()), given["grad"].expand_as(y))
    return {"y": y.detach(), **{f"d{n}": d for n, d in zip(wanted, grads, strict=True)}}


def saliency_results(
    case: Case, given: dict[str, Any], inputs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """y, the gradients, and the sums of effects."""
    sums = torch.zeros(given["mask"].shape, dtype=torch.float64, device=given["x"].device)
    anchor = torch.zeros((), device=given["x"].device, requires_grad=True)
    y = saliency(mask=given["mask"], anchor=anchor, totals=sums, coef=given["coef"],
                 absolute=case.op != "saliency_poly", **inputs)  # fmt: skip
    y.backward(given["grad"])
    assert anchor.grad is None
    gradients = {f"d{n}": t.grad for n, t in inputs.items() if t.grad is not None}
    sums = sums.to(compute_dtype(y.dtype))
    return {"y": y.detach(), **gradients, "sums": sums}


def family_arguments(case: Case, given: dict[str, Any]) -> list[Any]:
    """x, mask, coef, scale, shift and residual of reference.masked."""
    unit = given["alpha"] if case.op == "soft_relu" else given["mask"]
    affine = [given[n] if case.op in MASKED else None for n in ("scale", "shift")]
    return [given["x"], unit, given["coef"], *affine, given["residual"]]


def expected(case: Case, given: dict[str, Any], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same by the reference. The ReLU's backward reads `found["y"]`, as the op does."""
    grad = given["grad"].expand_as(found["y"])
    truth = {"y": formula(case, given)}
    x, unit, coef, scale, shift, residual = family_arguments(case, given)
    shared = [t is not None and case.stacked and t.ndim == unit.ndim for t in (x, residual)]
    y = found["y"] if case.op == "masked_relu" else None
    kind = {"soft_relu": 1, "indicator_poly": 1, "saliency_poly": 1, "saliency": 2,
            "saliency_line": 2}.get(case.op, 0)  # fmt: skip
    dx, dresidual, small, units = reference.masked_backward(
        grad, y, x, unit, coef, scale, shift, residual, case.stacked, *shared, True, True, kind
    )
    truth |= {"dx": dx, "dresidual": dresidual}
    if coef is not None:
        truth["dcoef"] = small[: len(coef)]
    if scale is not None:
        truth |= {"dscale": small[-2], "dshift": small[-1]}
    if kind:
        sums = -units if case.op == "saliency_poly" else units
        truth |= {"dalpha": units, "daux": softplus(given["aux"]) * units, "sums": sums}
    return {name: truth[name] for name in found}


def formula(case: Case, given: dict[str, Any]) -> Tensor:
    """y by the reference."""
    return reference.masked(*family_arguments(case, given), trials=case.stacked)


def differences(
    found: dict[str, Tensor], wanted: dict[str, Tensor], ulps: int = 0, *, rounding: float = 128
) -> list[str]:
    """How results differ: elementwise ones to the bit (or `ulps` in bf16), sums to rounding.

    Channel 0, where special values are, is compared on its own: its numbers may have any size.
    """
    lines = []
    for name, want in wanted.items():
        got = found[name]
        if ulps and want.dtype == torch.bfloat16 and got.shape == want.shape:
            close = ~(got.isnan() | want.isnan()) & (_steps(got, want) <= ulps)
            got = torch.where(close, want, got)
        if name in ELEMENTWISE or got.shape != want.shape:
            parts = [slice(None)]
        else:
            parts = [slice(0, 1), slice(1, None)]
        channel = 0 if name in ("dalpha", "daux", "sums") or want.ndim == 1 else 1
        for part in parts:
            a, b = (t.movedim(channel, 0)[part].movedim(0, channel) for t in (got, want))
            lines += library_differences({name: a}, {name: b}, ELEMENTWISE, rounding)
    return lines


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


def groups(dtypes: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """(op, dtype, trials) of every group of cases."""
    return [*product(MASKED, dtypes, TRIALS), *product(UNSTACKED, dtypes, ("none",))]


def grid(op: str, dtype: str, trials: str, *, orders: tuple[str, ...] = ORDERS[:2]) -> list[Case]:
    """Every variant of a group, at one tiny odd size."""
    flags = (False, True)
    return [
        Case(op, dtype, trials, order, mask_order, affine, residual, TINY, special=True)
        for residual, order, mask_order in product(flags, orders, ORDERS[:2])
        for affine in (flags if op in MASKED else (False,))
        if residual or trials not in ("shared residual", "both shared")
    ]


def odd_cases() -> Iterator[Case]:
    """Sizes at the edges: several tiles, more trials than a word has bits, ones, no space."""
    sizes = [
        (2, 3, 7, 12, 13), (1, 1, 3, 5, 1), (2, 4, 1, 3, 3), (3, 5, 17), (2, 5, 6, 7),
        (2, 3, 4, 2, 3, 2), (2, 2, 1),
    ]  # fmt: skip
    for op in MASKED:
        full = Case(op, affine=True, residual=True, special=True)
        for size, order, trials in product(sizes, ORDERS[:2], ("stacked", "shared x")):
            yield full._replace(trials=trials, order=order, mask_order="channels_last", sizes=size)
        for dtype, trials in product(("float32", "float16"), TRIALS):
            yield full._replace(dtype=dtype, trials=trials, sizes=TINY, frozen=True)
        for trials, count in product(TRIALS[2:], (32, 33)):  # a full word of bits, and more
            yield full._replace(dtype="float16", trials=trials, sizes=(count, 1, 2, 3))
        yield full._replace(dtype="float16", trials="stacked", sizes=sizes[0])
    for op, size, order in product(UNSTACKED, sizes, ORDERS[:2]):
        yield Case(op, order=order, mask_order="channels_last", residual=True, sizes=size)
        yield Case(op, "float16", order=order, sizes=size)


def parameters(given: dict[str, Any], case: Case) -> dict[str, Any]:
    """The keyword arguments of a masked op, besides mask and trials."""
    names = ("x", "scale", "shift", "residual", *(("coef",) if rows(case.op) else ()))
    return {n: given[n] for n in names}


def compare_out(case: Case, device: str = "cpu", ulps: int = 0) -> list[str]:
    """out= of a masked op: a new tensor, another memory order, x and the residual themselves."""
    given = arguments(case, device)
    function, a = function_of(case, given), parameters(given, case)
    want, lines = formula(case, given), []

    def check(target: str, **changed: Any) -> None:
        result = function(**{**a, **changed})
        assert result is changed["out"]
        lines.extend(f"{target}: {d}" for d in differences({"y": result}, {"y": want}, ulps))

    check("new", out=torch.full_like(want, float("nan")))
    check("sliced", out=want.new_empty((*want.shape[:-1], 2 * want.shape[-1]))[..., ::2])
    for name in ("x", "residual"):
        if a[name] is not None and a[name].shape == want.shape:
            own = a[name].clone()
            check(name, **{name: own, "out": own})
    return lines


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN equal to NaN; -0.0 and 0.0 count as equal."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )
