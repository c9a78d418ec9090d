"""What a call costs besides its arithmetic: 1,000 calls on a tensor of 256 numbers, so ms are µs.

    pytest benchmarks/test_overhead.py

Peers:
    eager      the same function in PyTorch's own calls
    operator   the torch operator behind the op, through torch's dispatcher
    function   a torch.autograd.Function that saves y and the mask and computes nothing: the share
               of PyTorch in "forward and backward"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastbcd import ops

CALLS = 1000
X, RESIDUAL, GRAD = torch.randn(3, 2, 8, 4, 4)
MASK = torch.rand(8, 4, 4) > 0.5
SCALE, SHIFT = torch.randn(2, 8)
COEF = torch.randn(3, 8)
AFFINE = {"scale": SCALE, "shift": SHIFT, "residual": RESIDUAL}


class Empty(torch.autograd.Function):
    """What every autograd.Function with one output and two saved tensors costs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        ctx.save_for_backward(y, mask)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        y, _ = ctx.saved_tensors
        return torch.empty_like(y), None


def plain(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    operator = torch.ops.fastbcd.masked_relu.default
    return {
        "fastbcd": lambda: ops.masked_relu(x, MASK, trials=False),
        "eager": lambda: torch.where(MASK, torch.relu(x), x),
        "operator": lambda: operator(x, MASK, None, None, None, False),
    }


def full(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    operator = torch.ops.fastbcd.masked_relu.default

    def eager() -> torch.Tensor:
        z = x * SCALE[:, None, None] + SHIFT[:, None, None] + RESIDUAL
        return torch.where(MASK, torch.relu(z), z)

    return {
        "fastbcd": lambda: ops.masked_relu(x, MASK, trials=False, **AFFINE),
        "eager": eager,
        "operator": lambda: operator(x, MASK, SCALE, SHIFT, RESIDUAL, False),
    }


def poly(
    x: torch.Tensor, *given: torch.Tensor, **options: torch.Tensor
) -> dict[str, Any]:
    operator = torch.ops.fastbcd.masked_poly.default
    scale, shift, residual = given or (None, None, None)

    def eager() -> torch.Tensor:
        z = x
        if scale is not None and shift is not None and residual is not None:
            z = x * scale[:, None, None] + shift[:, None, None] + residual
        c0, c1, c2 = COEF[:, :, None, None]
        return torch.where(MASK, torch.relu(z), (c2 * z + c1) * z + c0)

    return {
        "fastbcd": lambda: ops.masked_poly(x, MASK, COEF, trials=False, **options),
        "eager": eager,
        "operator": lambda: operator(x, MASK, COEF, scale, shift, residual, False),
    }


def full_poly(x: torch.Tensor) -> dict[str, Any]:
    return poly(x, SCALE, SHIFT, RESIDUAL, **AFFINE)


def backward(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    def gradient(forward: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), x, GRAD)

    calls = {**plain(x), "function": lambda: Empty.apply(x, MASK)}
    return {name: gradient(call) for name, call in calls.items()}


KINDS: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "masked_relu": plain,
    "masked_relu, affine and residual": full,
    "masked_poly": poly,
    "masked_poly, affine and residual": full_poly,
    "masked_relu, forward and backward": backward,
}
CASES = [(kind, name) for kind, calls in KINDS.items() for name in calls(X)]


@pytest.mark.parametrize(("kind", "implementation"), CASES)
def test_overhead(benchmark, kind, implementation) -> None:
    benchmark.group = f"1,000 small calls, {kind}"
    benchmark.extra_info.update(implementation=implementation)
    grad = KINDS[kind] is backward
    call = KINDS[kind](X.clone().requires_grad_(grad))[implementation]

    def calls() -> None:
        for _ in range(CALLS):
            call()

    with torch.set_grad_enabled(grad):
        benchmark.pedantic(calls, rounds=10, warmup_rounds=1)
