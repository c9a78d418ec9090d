"""How an op becomes a torch operator: its schema, its kernel or reference, its gradients.

autograd, torch.compile and torch.export see each operator `fastbcd::*` as one node. An operator
lays its tensors out as dense memory and passes them to a C++ kernel (CPU tensors) or a Triton
kernel (CUDA tensors) of the same name, or to `reference.py` where there is none. All give the same
bits.

Where a derivative itself is differentiated (`create_graph=True`), under torch.func and in
forward-mode AD, the formulas of `reference.py` run instead: they consist of differentiable torch
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastbcd import kernels
from fastbcd.kernels.geometry import Geometry, geometry

LIBRARY = torch.library.Library("fastbcd", "DEF")


class Call(NamedTuple):
    """One call of an operator on dense memory."""

    outputs: list[Any]  # empty tensors; None for a gradient that is not wanted
    inputs: tuple[Any, ...]  # of the kernel and of the formula
    geometry: tuple[Any, ...]  # the arguments of `geometry`
    extra: tuple[Any, ...] = ()  # further arguments of the formula
    fits: bool = True  # False: no kernel takes this call


def define(
    schema: str, lay_out: Callable[..., Call], formula: Callable[..., Any], kernel: str = ""
) -> Any:
    """Define the operator of `schema`: lay_out(*arguments), then kernel or formula.

    The kernel is called as kernel(*outputs, *inputs, geometry), the formula as
    formula(*inputs, *extra). A gradient that is not wanted is returned without elements.
    """
    name = schema.partition("(")[0]
    kernel = kernel or name
    single = schema.endswith("-> Tensor")

    def result(outputs: list[Any]) -> Any:
        if single:
            return outputs[0]
        return tuple(outputs[0].new_empty(0) if t is None else t for t in outputs)

    def implementation(*arguments: Any) -> Any:
        call = lay_out(*arguments)
        compute(kernel, formula, call)
        return result(call.outputs)

    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"fastbcd::{name}", lambda *a: result(lay_out(*a).outputs), lib=LIBRARY
    )
    return getattr(torch.ops.fastbcd, name).default


def compute(kernel: str, formula: Callable[..., Any], call: Call) -> None:
    """Fill the outputs of a call."""
    function = kernels.choose(kernel, call.inputs[0]) if call.fits else None
    if function is None:
        found = formula(*call.inputs, *call.extra)
        for out, value in zip(
            call.outputs, found if isinstance(found, tuple) else (found,), strict=True
        ):
            if out is not None:
                out.copy_(value)
        return
    g: Geometry = geometry(*call.geometry)
    if g.trials * g.batch * g.channels * g.inner:
        function(*call.outputs, *call.inputs, g)
    else:  # sums over nothing
        for out in call.outputs:
            if out is not None:
                out.zero_()


def differentiate(
    name: str, setup: Callable[..., None], gradients: Callable[..., Any]
) -> None:  # fmt: skip
    """Register the gradients of an operator: setup(ctx, inputs, output), gradients(ctx, *grads)."""
    torch.library.register_autograd(f"fastbcd::{name}", gradients, setup_context=setup, lib=LIBRARY)


def transformed() -> bool:
    """True under torch.func (grad, vmap, jacrev, ...) and in forward-mode AD."""
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


def differentiated() -> bool:
    """In a backward pass: True if its results are differentiated or batched in turn."""
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()


def contiguous(t: Tensor | None) -> Any:
    """t as contiguous memory: what every per-channel argument of a kernel must be."""
    return None if t is None else t.contiguous()
