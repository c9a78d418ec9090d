"""What a call costs besides its arithmetic: 1,000 calls on a tensor of 256 numbers, so ms are µs.

    pytest benchmarks/test_overhead.py

Peers:
    add, relu  torch.relu(x + residual): two of torch's own operators
    eager      the same function in torch's own calls
    function   a torch.autograd.Function that saves two tensors and computes nothing: the share of
               torch in "forward and backward"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastbcd import ops

CALLS = 1000
X, RESIDUAL, GRAD = torch.randn(3, 2, 8, 4, 4)
MASK = torch.rand(8, 4, 4) > 0.5
SCALE, SHIFT = torch.randn(2, 8)
COEF = torch.randn(3, 8)
AFFINE = {"scale": SCALE, "shift": SHIFT}


class Empty(torch.autograd.Function):
    """What every autograd.Function with one output and two saved tensors costs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, mask: Tensor) -> Tensor:
        y = torch.empty_like(x)
        ctx.save_for_backward(y, mask)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, _ = ctx.saved_tensors
        dx = torch.empty_like(y)
        return dx, dx, None


def eager(x: Tensor, residual: Tensor) -> Tensor:
    z = x + residual
    return torch.where(MASK, torch.relu(z), z)


def eager_affine(x: Tensor, residual: Tensor) -> Tensor:
    return eager(x * SCALE[:, None, None] + SHIFT[:, None, None], residual)


def eager_line(x: Tensor, residual: Tensor) -> Tensor:
    z = x + residual
    c0, c1 = COEF[:2, :, None, None]
    return torch.where(MASK, torch.relu(z), c1 * z + c0)


def fastbcd(op: str, *coef: Tensor, **affine: Tensor) -> Callable[..., Tensor]:
    function = getattr(ops, op)
    return lambda x, residual: function(x, MASK, *coef, residual=residual, **affine)


def add_relu(x: Tensor, residual: Tensor) -> Tensor:
    return torch.relu(x + residual)


def function(x: Tensor, residual: Tensor) -> Tensor:
    return Empty.apply(x, residual, MASK)


KINDS: dict[str, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "masked_relu": {"fastbcd": fastbcd("masked_relu"), "eager": eager},
    "masked_relu, affine": {
        "fastbcd": fastbcd("masked_relu", **AFFINE),
        "eager": eager_affine,
    },
    "masked_line": {"fastbcd": fastbcd("masked_line", COEF[:2]), "eager": eager_line},
    "masked_poly": {"fastbcd": fastbcd("masked_poly", COEF)},
}
PEERS = {"add, relu": add_relu, "function": function}
CASES = [
    (kind, name, backward)
    for kind, implementations in KINDS.items()
    for name in (*implementations, *PEERS)
    for backward in (False, True)
]


@pytest.mark.parametrize(("kind", "implementation", "backward"), CASES)
def test_overhead(benchmark, kind, implementation, backward) -> None:
    what = "forward and backward" if backward else "forward"
    benchmark.group = f"1,000 small calls, {kind}, {what}"
    benchmark.extra_info.update(implementation=implementation)
    call = (KINDS[kind] | PEERS)[implementation]
    x, residual = (t.clone().requires_grad_(backward) for t in (X, RESIDUAL))

    def calls() -> None:
        for _ in range(CALLS):
            y = call(x, residual)
            if backward:
                torch.autograd.grad(y, (x, residual), GRAD)

    with torch.set_grad_enabled(backward):
        benchmark.pedantic(calls, rounds=10, warmup_rounds=1)
