"""The activations that SNL and AutoReP train, forward and backward: one pass against the formulas.

    make bench
    python benchmarks/table.py benchmarks/test_soft.py

Peers, on the same tensors, all with a residual, channels_last, batch 128:
    published  the formula as its authors write it, in eager PyTorch
    compiled   torch.compile of it
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastbcd import ops

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SHAPES = [(128, 64, 32, 32), (128, 128, 16, 16), (128, 512, 4, 4)]


class Case:
    """One set of tensors, and each implementation of a step on them."""

    def __init__(self, op: str, shape: tuple[int, ...], device: str) -> None:
        torch.manual_seed(0)
        self.op = op

        def draw(*size: int) -> Tensor:
            t = torch.randn(size, device=device)
            return t.movedim(-3, -1).contiguous().movedim(-1, -3)

        self.x, self.residual, self.grad = draw(*shape), draw(*shape), draw(*shape)
        self.units, self.coef = (
            draw(*shape[1:]),
            torch.randn(3, shape[1], device=device),
        )
        self.mask = self.units > 0
        self.leaves = [self.x, self.residual, self.units]
        self.leaves += [self.coef] if op == "indicator_poly" else []
        for leaf in self.leaves:
            leaf.requires_grad_()

    def published(self) -> Tensor:
        z = self.x + self.residual
        if self.op == "soft_relu":
            return self.units * torch.relu(z) + (1 - self.units) * z
        # The bit forward; its gradient goes straight through to aux, times softplus(aux).
        aux = self.units
        m = self.mask.float() + F.softplus(aux).detach() * (aux - aux.detach())
        c0, c1, c2 = self.coef[:, :, None, None]
        return m * torch.relu(z) + (1 - m) * (c2 * z * z + c1 * z + c0)

    def fastbcd(self) -> Tensor:
        if self.op == "soft_relu":
            return ops.soft_relu(self.x, self.units, residual=self.residual)
        return ops.indicator_poly(
            self.x, self.mask, self.coef, self.units, residual=self.residual
        )  # fmt: skip

    def gradients(self, y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, self.leaves, self.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["soft_relu", "indicator_poly"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("implementation", ["published", "compiled", "fastbcd"])
def test_forward_backward(benchmark, implementation, shape, op, device) -> None:
    case = Case(op, shape, device)
    benchmark.group = f"{op} forward+backward {'x'.join(map(str, shape))} {device}"
    benchmark.extra_info.update(implementation=implementation)
    if implementation == "compiled":
        torch._dynamo.reset()
        run = torch.compile(case.published, dynamic=False)
    else:
        run = getattr(case, implementation)
    wanted = case.gradients(case.published())
    for found, value in zip(case.gradients(run()), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-2)

    def step() -> None:
        case.gradients(run())
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(step, rounds=10, warmup_rounds=2)
