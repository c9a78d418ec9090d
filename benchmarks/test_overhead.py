"""What a call costs besides its arithmetic: 1,000 calls on a tensor of 256 numbers, so ms are µs.

    pytest benchmarks/test_overhead.py

Peers:
    eager      the same function in PyTorch's own calls
    operator   the torch operator behind the op, through torch's dispatcher
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fastbcd import ops

CALLS = 1000
X, RESIDUAL, GRAD = torch.randn(3, 2, 8, 4, 4)
MASK = torch.rand(8, 4, 4) > 0.5
SCALE, SHIFT = torch.randn(2, 8)


def plain(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    operator = torch.ops.fastbcd.masked_relu.default
    return {
        "fastbcd": lambda: ops.masked_relu(x, MASK, trials=False),
        "eager": lambda: torch.where(MASK, torch.relu(x), x),
        "operator": lambda: operator(x, MASK, None, None, None, False),
    }


def full(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    options = {"scale": SCALE, "shift": SHIFT, "residual": RESIDUAL}
    operator = torch.ops.fastbcd.masked_relu.default

    def eager() -> torch.Tensor:
        z = x * SCALE[:, None, None] + SHIFT[:, None, None] + RESIDUAL
        return torch.where(MASK, torch.relu(z), z)

    return {
        "fastbcd": lambda: ops.masked_relu(x, MASK, trials=False, **options),
        "eager": eager,
        "operator": lambda: operator(x, MASK, SCALE, SHIFT, RESIDUAL, False),
    }


def backward(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    def gradient(forward: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), x, GRAD)

    return {name: gradient(call) for name, call in plain(x).items()}


KINDS = {"no_grad": plain, "no_grad, affine and residual": full, "forward and backward": backward}


@pytest.mark.parametrize("implementation", ["fastbcd", "eager", "operator"])
@pytest.mark.parametrize("kind", KINDS)
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
