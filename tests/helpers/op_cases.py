"""The cases (`fastbcd.ops.selfcheck.Case`) that the tests of the ops and of their kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fastbcd.ops import reference
from fastbcd.ops.selfcheck import SALIENCY, TRIALS, Case, arguments, differences, function_of

MASKED = ("masked_relu", "masked_poly")
UNSTACKED = ("soft_relu", "indicator_poly", *SALIENCY)  # without trials and affine
DIFFERENTIABLE = (*MASKED, "soft_relu", "indicator_poly", "norm_relu")
ORDERS = ("contiguous", "channels_last", "sliced")
TINY = (2, 2, 5, 3, 3)
# Site shapes for [B, F], [B, L, F], [B, C, H, W] and 5-D; odd, even, one channel, one element.
SITES = [(1,), (13,), (64,), (5, 7), (3, 5, 4), (16, 8, 8), (1, 6, 5), (7, 1, 1), (4, 3, 2, 5)]


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
    """The keyword arguments of `masked_relu` or `masked_poly`, besides mask and trials."""
    names = ("x", "scale", "shift", "residual", *(("coef",) if case.op == "masked_poly" else ()))
    return {n: given[n] for n in names}


def truth(case: Case, given: dict[str, Any]) -> Tensor:
    """The reference's y of a masked op."""
    a = parameters(given, case)
    return getattr(reference, case.op)(mask=given["mask"], trials=case.stacked, **a)


def compare_out(case: Case, device: str = "cpu", ulps: int = 0) -> list[str]:
    """out= of a masked op: a new tensor, another memory order, x and the residual themselves."""
    given = arguments(case, device)
    function, a = function_of(case, given), parameters(given, case)
    want, lines = truth(case, given), []

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
