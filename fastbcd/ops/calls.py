"""A call of a kernel on dense memory, and the formula that states its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbcd.kernels.geometry import compute_dtype, dense_together, geometry


class Call(NamedTuple):
    """One call of a kernel on dense memory."""

    outputs: list[Any]  # empty tensors; None for a gradient that is not wanted
    inputs: tuple[Any, ...]  # of the kernel and of the formula
    geometry: tuple[Any, ...]  # the arguments of `geometry`; empty: the kernel takes none
    extra: tuple[Any, ...] = ()  # further arguments of the formula
    fits: bool = True  # False: no kernel takes this call


class Kernel(NamedTuple):
    """A kernel(*outputs, *inputs, geometry) writes what formula(*inputs, *extra) returns."""

    schema: str  # of its operator
    lay_out: Callable[..., Call]
    formula: Callable[..., Any]


KERNELS: dict[str, Kernel] = {}


def by_formula(formula: Callable[..., Any], call: Call) -> None:
    """Fill the outputs of a call with the values of the formula."""
    found = formula(*call.inputs, *call.extra)
    found = found if isinstance(found, tuple) else (found,)
    for out, value in zip(call.outputs, found, strict=True):
        if out is not None:
            out.copy_(value)


def by_kernel(function: Callable[..., None], call: Call) -> None:
    """Make the kernel fill the outputs of a call; sums over nothing are 0."""
    if not call.geometry:
        function(*call.outputs, *call.inputs)
        return
    g = geometry(*call.geometry)
    if g.trials * g.batch * g.channels * g.inner:
        function(*call.outputs, *call.inputs, g)
    else:
        for out in call.outputs:
            if out is not None:
                out.zero_()


def contiguous(t: Tensor | None) -> Any:
    """t as contiguous memory: what every per-channel argument of a kernel must be."""
    return None if t is None else t.contiguous()


def backward_call(grad, x, mask, coef, residual, *flags, more=()) -> Call:
    """The backward of an activation without trials: dx, more results, and a sum for each unit."""
    mask, x, residual, grad = dense_together(mask, False, x, residual, grad)
    sums = x.new_empty_strided(x.shape[1:], x.stride()[1:], dtype=compute_dtype(x.dtype))
    inputs = (grad, x, mask, contiguous(coef), residual, *flags)
    return Call([torch.empty_like(x), *more, sums], inputs, (x, mask))
