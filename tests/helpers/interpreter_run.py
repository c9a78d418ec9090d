"""Run the Triton cases under the interpreter and print {case: differences} as JSON.

test_interpreter.py starts this in a process of its own, because TRITON_INTERPRET=1 must be set
before triton is imported:   TRITON_INTERPRET=1 python tests/gpu/interpreter_run.py
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from triton.runtime.interpreter import InterpretedFunction

from fastbcd import kernels, ops
from helpers.triton_cases import (
    Case,
    differences,
    expected,
    grid,
    odd_cases,
    op_cases,
    run,
    saliency_arguments,
    soft_op_cases,
    tensors,
)

triton_kernels = kernels.TRITON.module
ULPS = 1  # the interpreter truncates to bf16, a GPU rounds


def check(case: Case) -> list[str]:
    """The kernel against the reference, and in place where that is allowed."""
    t = tensors(case)
    lines = differences(run(case, t, triton_kernels), expected(case, t), ULPS)
    if case.direction == "forward" and case.dtype == "float32":
        for name, shared in (("x", case.x_shared), ("residual", case.residual_shared)):
            operand = getattr(t, name)
            if operand is not None and not shared:
                y = operand.clone()
                found = run(case, t._replace(**{name: y}), triton_kernels, y)
                found = differences(found, expected(case, t), ULPS)
                lines += [f"in place of {name}: {line}" for line in found]
    return lines


def check_op(case: Case) -> list[str]:
    """The same through the public ops and autograd."""
    t = tensors(case)
    if kernels.choose(t.x) is not triton_kernels:
        return ["the ops do not use the Triton kernels"]
    parameters = {"scale": t.scale, "shift": t.shift, "residual": t.residual}
    parameters = {k: v for k, v in parameters.items() if v is not None}
    parameters |= {"x": t.x} | ({"coef": t.coef} if case.op == "poly" else {})
    for p in parameters.values():
        p.requires_grad_()
    act = ops.masked_relu if case.op == "relu" else ops.masked_poly
    y = act(mask=t.mask, trials=case.trials != "none", **parameters)
    grads = torch.autograd.grad(y, list(parameters.values()), t.grad)
    found = dict(zip((f"d{name}" for name in parameters), grads, strict=True))
    if case.affine:
        found["daffine"] = torch.stack([found.pop("dscale"), found.pop("dshift")])
    with torch.no_grad():
        out = act(mask=t.mask, trials=case.trials != "none", out=torch.empty_like(y), **parameters)
        lines = differences({"y": y.detach()}, {"y": t.y}, ULPS)
        lines += differences({"y": out}, {"y": t.y}, ULPS)
        # The backward of the masked ReLU looks at the forward's own y.
        return lines + differences(found, expected(case, t._replace(y=y)), ULPS)


def check_soft_op(case: Case) -> list[str]:
    """The same for what SNL and AutoReP train, and for the saliency."""
    t = tensors(case)
    if case.op in ("saliency", "saliency_poly"):
        found = torch.ops.fastbcd.saliency_backward.default(*saliency_arguments(case, t))
        return differences(dict(zip(("dx", "sums"), found, strict=True)), expected(case, t), ULPS)
    units, rest = ("alpha", {}) if case.op == "soft" else ("aux", {"coef": t.coef})
    parameters = {"x": t.x, units: t.units, **rest}
    parameters |= {} if t.residual is None else {"residual": t.residual}
    for p in parameters.values():
        p.requires_grad_()
    act = ops.soft_relu if case.op == "soft" else partial(ops.indicator_poly, mask=t.mask)
    y = act(**parameters)
    grads = torch.autograd.grad(y, list(parameters.values()), t.grad)
    found = dict(zip((f"d{name}" for name in parameters), grads, strict=True))
    with torch.no_grad():
        wanted = expected(case, t)
        if case.op == "indicator":  # y is the masked polynomial
            wanted["daux"] = F.softplus(t.units) * wanted.pop("dmask")
        if case.residual:
            wanted["dresidual"] = wanted["dx"]
        return differences({"y": y.detach(), **found}, {"y": t.y, **wanted}, ULPS)


def prepare_helpers_once() -> None:
    """Spare half of the time: a jitted helper prepares triton.language anew in every call.

    Its first call does that for all of its module, inside a launch that did the same.
    """
    prepared = set()
    prepare_and_call = InterpretedFunction.__call__

    def call(self, *args, **kwargs):
        if self.fn.__module__ in prepared:
            return self.rewrite()(*args, **kwargs)
        prepared.add(self.fn.__module__)
        return prepare_and_call(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def results() -> dict[str, list[str]]:
    """{case: differences}; an exception counts as one."""
    torch.set_num_threads(1)
    prepare_helpers_once()
    torch.use_deterministic_algorithms(True)  # torch.empty is then NaN
    np.seterr(all="ignore")  # overflow is part of the cases
    groups: list[tuple[str, list[Case], Callable[[Case], list[str]]]] = [
        ("op ", op_cases(), check_op),
        ("soft op ", soft_op_cases(), check_soft_op),
        ("", [*grid(), *odd_cases()], check),
    ]
    found = {}
    for prefix, cases, function in groups:
        for case in cases:
            try:
                found[f"{prefix}{case}"] = function(case)
            except Exception:
                found[f"{prefix}{case}"] = [traceback.format_exc()]
        # Several items a program, with a rest; before, a program had one item.
        triton_kernels.common.ELEMENTWISE = triton_kernels.common.REDUCING = (1, 2)
    return found


if __name__ == "__main__":
    json.dump(results(), sys.stdout)
