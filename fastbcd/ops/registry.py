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

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from fastbcd import kernels
from fastbcd.ops import reference
from fastbcd.ops.calls import KERNELS, Call, Kernel, by_formula, by_kernel
from fastbcd.ops.selfcheck import trusted

LIBRARY = torch.library.Library("fastbcd", "DEF")
OPERATORS: dict[str, Operator] = {}
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None), bool, float}


class Operator:
    """The torch operator of a schema: a call is one node for autograd and torch.compile.

    The formula of the same name in `reference.py` runs instead under torch.func and in
    forward-mode AD, and for a derivative that is differentiated in turn. A call that nothing
    watches skips torch's dispatcher, which takes longer than everything else in a small call.
    """

    def __init__(self, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
        self.name, self.run = schema.partition("(")[0], run
        OPERATORS[self.name] = self
        LIBRARY.define(schema)
        LIBRARY.impl(self.name, run, "CompositeExplicitAutograd")
        self.default = getattr(torch.ops.fastbcd, self.name).default

        def traced(*arguments: Any) -> Any:
            self._keep_whole()
            return fake(*arguments)

        torch.library.register_fake(f"fastbcd::{self.name}", traced, lib=LIBRARY)
        self.formula: Any = getattr(reference, self.name, None)
        self.recorded: Any = None  # the call that autograd records
        self.outputs: Any = run  # as run, with None for a gradient that is not wanted
        if self.formula is not None:  # torch.onnx.export decomposes what it does not know
            torch._decomp.decomposition_table[self.default] = self.formula
            torch._decomp.meta_table[self.default] = fake  # and shapes are those of the operator

    def __call__(self, *arguments: Any) -> Any:
        if self.formula is not None and transformed():
            return self.formula(*arguments)
        if watched(arguments):
            return self.default(*arguments)
        if self.recorded and torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return self.recorded(*arguments)
        return self.run(*arguments)

    def _keep_whole(self) -> None:
        """Register the operator with inductor, if that is loaded, as a call to leave as it is.

        Inductor does the same for an operator that it does not know, but with `CI` in the
        environment it raises an error for one that has a decomposition. It traces a net before it
        looks the operators up; to import it here would take seconds.
        """
        inductor: Any = sys.modules.get("torch._inductor.lowering")
        if inductor is not None and self.default not in inductor.lowerings:
            tag = torch._library.utils.get_layout_constraint_tag(self.default)
            layout = inductor.tag_to_layout_constraint(tag)
            inductor.make_fallback(self.default, layout_constraint=layout, warn=False)

    def derivative(self, *arguments: Any, flags: tuple[bool, ...] = ()) -> Any:
        """A call in a backward pass. flags: further arguments, which the formula does not take.

        A gradient that is not wanted is None or has no elements.
        """
        if differentiated():
            return self.formula(*arguments)
        return (self.default if watched(arguments) else self.outputs)(*arguments, *flags)

    def differentiate(self, setup: Callable[..., None], gradients: Callable[..., Any]) -> None:
        """Register its gradients: setup(ctx, inputs, output), gradients(ctx, *grads)."""
        name = f"fastbcd::{self.name}"
        torch.library.register_autograd(name, gradients, setup_context=setup, lib=LIBRARY)

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = self.run(*arguments)
            setup(ctx, arguments, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
        function: Any = type(self.name, (torch.autograd.Function,), methods)
        self.recorded = function.apply


def define(
    schema: str, lay_out: Callable[..., Call], formula: Any = None,
    short: Callable[..., list[Any] | None] = lambda *arguments: None,
) -> Operator:  # fmt: skip
    """Define the operator of `schema`: lay_out(*arguments), then kernel or formula.

    A gradient that is not wanted is returned without elements. formula: by default the one of the
    same name. short: tried first; returns the outputs, or None for a call that it does not take.
    """
    name = schema.partition("(")[0]
    kernel = name if name.endswith("_backward") else f"{name}_forward"
    KERNELS[kernel] = Kernel(schema, lay_out, formula or getattr(reference, name))

    single = schema.endswith("-> Tensor")

    def result(outputs: list[Any]) -> Any:
        if single:
            return outputs[0]
        return tuple(outputs[0].new_empty(0) if t is None else t for t in outputs)

    def outputs(*arguments: Any) -> list[Any]:
        found = short(*arguments)
        if found is not None:
            return found
        call = lay_out(*arguments)
        compute(kernel, call)
        return call.outputs

    operator = Operator(
        schema, lambda *a: result(outputs(*a)), lambda *a: result(lay_out(*a).outputs)
    )
    operator.outputs = outputs
    return operator


def compute(kernel: str, call: Call) -> None:
    """Fill the outputs of a call, by the kernel or else by its formula."""
    x = call.inputs[0]
    module = kernels.module_for(x) if call.fits else None
    function: Any = getattr(module, kernel, None)
    if module is None or not (function and (module.TRUSTED or trusted(kernel, function, x))):
        by_formula(KERNELS[kernel].formula, call)
    else:
        by_kernel(function, call)


def watched(arguments: tuple[Any, ...]) -> bool:
    """Must a call be one node: is it compiled, traced, seen by a dispatch mode or by a subclass?"""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or not _PLAIN.issuperset(map(type, arguments))
        or arguments[0].is_meta
        or torch._C._functorch.is_legacy_batchedtensor(arguments[0])  # is_grads_batched=True
    )


def unseen(arguments: tuple[Any, ...]) -> bool:
    """True if nothing watches, records or transforms a call."""
    return not (
        watched(arguments)
        or transformed()
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments))
    )


def transformed() -> bool:
    """True under torch.func (grad, vmap, jacrev, ...) and in forward-mode AD."""
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


def differentiated() -> bool:
    """In a backward pass: True if its results are differentiated or batched in turn."""
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
