"""How an op becomes a torch operator: its schema, its kernel or reference, its gradients.

autograd, torch.compile and torch.export see each operator `fastbcd::*` as one node. An operator
lays its tensors out as dense memory and passes them to a C++ kernel (CPU tensors) or a Triton
kernel (CUDA tensors) of the same name, or to `reference.py` where there is none. All give the same
bits.

Where a derivative itself is differentiated (`create_graph=True`) the formulas of `reference.py` run
instead: they consist of differentiable torch calls. There are no rules for torch.func and for
forward-mode AD: torch refuses them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fastbcd import kernels
from fastbcd.ops import reference
from fastbcd.ops.calls import KERNELS, Kernel, KernelCall, by_formula, by_kernel
from fastbcd.ops.selfcheck import trusted

LIBRARY = torch.library.Library("fastbcd", "DEF")
OPERATORS: dict[str, Operator] = {}
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float}


class Operator:
    """The torch operator of a schema: a call is one node for autograd and torch.compile.

    A call that nothing watches skips torch's dispatcher, which takes longer than everything else in
    a small call.
    """

    def __init__(
        self,
        schema: str,
        run: Callable[..., Any],
        fake: Callable[..., Any],
        short: Callable[..., Any] | None = None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self.run = run
        # The result of a call that needs no checks and copies, or None.
        self.short = short
        self.recorded: Any = None  # the call that autograd records
        self.short_recorded: Any = None
        self.formula: Any = getattr(reference, self.name, None)
        OPERATORS[self.name] = self
        LIBRARY.define(schema)

        def dispatched(*arguments: Any) -> Any:
            return _without_none(run(*arguments))

        LIBRARY.impl(self.name, dispatched, "CompositeExplicitAutograd")
        self.default = getattr(torch.ops.fastbcd, self.name).default

        def traced(*arguments: Any) -> Any:
            self._keep_whole()
            return _without_none(fake(*arguments))

        torch.library.register_fake(f"fastbcd::{self.name}", traced, lib=LIBRARY)
        if self.formula is not None:
            # torch.onnx.export decomposes what it does not know; shapes are the operator's.
            torch._decomp.decomposition_table[self.default] = self.formula
            torch._decomp.meta_table[self.default] = traced

    def __call__(self, *arguments: Any) -> Any:
        if watched(arguments):
            return self.default(*arguments)
        if self.recorded and (differentiable(arguments) or transformed()):
            return self.recorded(*arguments)
        return self.run(*arguments)

    def unchecked(self, *arguments: Any) -> Any:
        """The result of a call whose arguments nobody has checked, or None: then check them."""
        if self.short is None or watched(arguments) or transformed():
            return None
        if differentiable(arguments):
            return self.short_recorded(*arguments)
        return self.short(*arguments)

    def derivative(self, *arguments: Any) -> Any:
        """A call in a backward pass; a gradient that is not wanted is None or has no elements."""
        if differentiated():
            return self.formula(*arguments)
        if watched(arguments):
            return self.default(*arguments)
        return self.run(*arguments)

    def differentiate(
        self, setup: Callable[..., None], gradients: Callable[..., Any]
    ) -> None:
        """Register its gradients: setup(ctx, inputs, output), gradients(ctx, *grads)."""
        name = f"fastbcd::{self.name}"
        torch.library.register_autograd(
            name, gradients, setup_context=setup, lib=LIBRARY
        )

        def recorded(run: Any) -> Any:
            def forward(ctx: Any, *arguments: Any) -> Any:
                output = run(*arguments)
                if output is not None:
                    setup(ctx, arguments, output)
                return output

            methods = {
                "forward": staticmethod(forward),
                "backward": staticmethod(gradients),
            }
            function: Any = type(self.name, (torch.autograd.Function,), methods)
            return function.apply

        self.recorded = recorded(self.run)
        if self.short is not None:
            self.short_recorded = recorded(self.short)

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


def define(
    schema: str,
    lay_out: Callable[..., KernelCall],
    short: Callable[..., Any] | None = None,
) -> Operator:
    """Define the operator of `schema`: lay_out(*arguments), then kernel or formula.

    short: tried first; returns the result, or None for a call that it does not take.
    """
    name = schema.partition("(")[0]
    kernel = f"{name}_forward"
    if name.endswith("_backward"):
        kernel = name
    KERNELS[kernel] = Kernel(schema, lay_out, getattr(reference, name))

    def run(*arguments: Any) -> Any:
        if short is not None:
            quick = short(*arguments)
            if quick is not None:
                return quick
        call = lay_out(*arguments)
        compute(kernel, call, arguments)
        return result(call)

    def fake(*arguments: Any) -> Any:
        return result(lay_out(*arguments))

    def result(call: KernelCall) -> Any:
        if schema.endswith("-> Tensor"):
            return call.outputs[0]
        return tuple(call.outputs)

    return Operator(schema, run, fake, short)


def _without_none(outputs: Any) -> Any:
    """A gradient that is not wanted, without elements: torch's operators return tensors."""
    if not isinstance(outputs, tuple):
        return outputs
    return tuple(outputs[0].new_empty(0) if t is None else t for t in outputs)


def compute(kernel: str, call: KernelCall, arguments: Sequence[Any]) -> None:
    """Fill the outputs of a call, by the kernel or else by its formula of the arguments."""
    x = call.inputs[0]
    if call.fits:
        module: Any = kernels.module_for(x)
        function: Any = getattr(module, kernel, None)
        if function and (module.TRUSTED or trusted(kernel, call.variant, function, x)):
            by_kernel(function, call)
            return
    by_formula(KERNELS[kernel].formula, call, arguments)


def watched(arguments: tuple[Any, ...]) -> bool:
    """Must a call be one node: is it compiled, traced, seen by a dispatch mode or by a subclass?"""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or not _PLAIN.issuperset(map(type, arguments))
        or arguments[0].is_meta
        # is_grads_batched=True
        or torch._C._functorch.is_legacy_batchedtensor(arguments[0])
    )


def differentiable(arguments: tuple[Any, ...]) -> bool:
    """Does autograd record a call?"""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)


def transformed() -> bool:
    """True under torch.func (grad, vmap, jacrev, ...) and in forward-mode AD."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def differentiated() -> bool:
    """In a backward pass: True if its results are differentiated or batched in turn."""
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
