"""A call of a kernel on dense memory, and the formula that states its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastbcd.kernels.geometry import geometry


class KernelCall(NamedTuple):
    """One call of a kernel on dense memory."""

    outputs: list[Any]  # empty tensors; None for a gradient that is not wanted
    inputs: tuple[Any, ...]
    geometry: tuple[
        Any, ...
    ] = ()  # the arguments of `geometry`; empty: the kernel takes none
    variant: str = ""  # which constants the kernel is compiled with
    fits: bool = True  # False: no kernel takes this call


class Kernel(NamedTuple):
    """A kernel(*outputs, *inputs, geometry) on the memory that lay_out(*arguments) describes.

    It writes what formula(*arguments) returns.
    """

    schema: str  # of the operator that has these arguments
    lay_out: Callable[..., KernelCall]
    formula: Callable[..., Any]


KERNELS: dict[str, Kernel] = {}


def by_formula(
    formula: Callable[..., Any], call: KernelCall, arguments: Sequence[Any]
) -> None:
    """Fill the outputs of a call with the values of the formula."""
    values = formula(*arguments)
    if not isinstance(values, tuple):
        values = (values,)
    for output, value in zip(call.outputs, values, strict=True):
        if output is not None:
            output.copy_(value)


def by_kernel(function: Callable[..., None], call: KernelCall) -> None:
    """Make the kernel fill the outputs of a call; sums over nothing are 0."""
    if not call.geometry:
        function(*call.outputs, *call.inputs)
        return
    shape = geometry(*call.geometry)
    if shape.trials * shape.batch * shape.channels * shape.inner:
        function(*call.outputs, *call.inputs, shape)
        return
    for output in call.outputs:
        if output is not None:
            output.zero_()


def contiguous(t: Tensor | None) -> Any:
    """t as contiguous memory: what every per-channel argument of a kernel must be."""
    return None if t is None else t.contiguous()
