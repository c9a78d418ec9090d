"""Batch norm + residual + masked ReLU: fastbcd's one pass against what a user would write.

    make bench                                             the table
    pytest benchmarks/test_activations.py -k "14x14"       one shape

Peers, all computing the same function of the same tensors:
    snl        batch norm, add, relu(x)*a + (1-a)*x: the formula of SNL and of the authors' BCD
    maximum    batch norm, add, maximum(x, bound) with bound 0 or -inf: the best eager form
    compiled   torch.compile of `maximum`
    copy       y.copy_(x) into an existing tensor: the limit set by memory
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastbcd import ops

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SHAPES = [(128, 64, 32, 32), (128, 128, 16, 16), (128, 256, 8, 8), (128, 512, 4, 4),
          (64, 256, 14, 14)]  # fmt: skip
FORWARD = ["snl", "maximum", "compiled", "fastbcd", "fastbcd in place", "copy"]
BACKWARD = ["snl", "maximum", "compiled", "fastbcd"]


class Tensors:
    """One set of inputs, shared by all implementations of a case."""

    def __init__(
        self, shape: tuple[int, ...], order: str, trials: int, device: str
    ) -> None:
        torch.manual_seed(0)
        memory = (
            torch.channels_last if order == "channels_last" else torch.contiguous_format
        )

        def draw(*size: int) -> Tensor:
            return torch.randn(size, device=device).to(memory_format=memory)

        c, lead = shape[1], (trials,) if trials > 1 else ()
        self.x, self.residual = draw(*shape), draw(*shape)
        self.grad = torch.randn_like(self.x).expand(*lead, *shape).contiguous()
        if order == "channels_last":
            self.grad = draw(max(trials, 1) * shape[0], *shape[1:]).view(*lead, *shape)
        self.mean, self.var = (
            draw_small(c, device),
            draw_small(c, device).square() + 0.5,
        )
        self.weight, self.bias = draw_small(c, device), draw_small(c, device)
        # What the fused op takes: the batch norm as a scale and a shift.
        self.scale = self.weight / (self.var + 1e-5).sqrt()
        self.shift = self.bias - self.mean * self.scale
        self.mask = torch.rand((*lead, *shape[1:]), device=device) > 0.5
        alpha = self.mask.float().unsqueeze(-4)  # [T, 1, C, H, W]
        bound = torch.where(self.mask, 0.0, float("-inf")).unsqueeze(-4)
        self.alpha, self.bound = (
            t.movedim(-3, -1).contiguous().movedim(-1, -3)
            if order == "channels_last"
            else t
            for t in (alpha, bound)
        )
        self.out = torch.empty_like(self.grad)

    def normalised(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, self.weight, self.bias) + residual

    def snl(self, x: Tensor, residual: Tensor) -> Tensor:
        z = self.normalised(x, residual)
        return torch.relu(z) * self.alpha + (1 - self.alpha) * z

    def maximum(self, x: Tensor, residual: Tensor) -> Tensor:
        return torch.maximum(self.normalised(x, residual), self.bound)

    def fastbcd(self, x: Tensor, residual: Tensor, out: Tensor | None = None) -> Tensor:
        return ops.masked_relu(
            x, self.mask, scale=self.scale, shift=self.shift, residual=residual, out=out
        )


def draw_small(c: int, device: str) -> Tensor:
    return torch.randn(c, device=device)


def function_of(t: Tensors, implementation: str) -> Callable[[Tensor, Tensor], Tensor]:
    if implementation == "compiled":
        torch._dynamo.reset()
        return torch.compile(t.maximum, dynamic=False)
    if implementation == "fastbcd in place":
        target = t.x.clone() if t.mask.ndim == 3 else t.out
        return lambda x, residual: t.fastbcd(
            target if t.mask.ndim == 3 else x, residual, target
        )
    if implementation == "copy":
        source = t.grad
        return lambda x, residual: t.out.copy_(source)
    return getattr(t, implementation)


CASES = [
    pytest.param(shape, order, id=f"{'x'.join(map(str, shape))}-{order}")
    for shape in SHAPES
    for order in ("contiguous", "channels_last")
]
EACH = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("trials", [1, 8], ids=["T=1", "T=8"]),
    pytest.mark.parametrize(("shape", "order"), CASES),
]


def measure(
    benchmark, function: Callable[[], object], trials: int, device: str
) -> None:
    def synchronised() -> None:
        function()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(synchronised, rounds=15 if trials == 1 else 3, warmup_rounds=2)


def describe(
    benchmark, mode: str, shape, order, trials, device, implementation
) -> None:
    benchmark.group = f"{mode} {'x'.join(map(str, shape))} {order} T={trials} {device}"
    benchmark.extra_info.update(
        mode=mode, shape=list(shape), order=order, trials=trials, device=device,
        implementation=implementation,
    )  # fmt: skip


def each(implementations: list[str]):
    """All cases; the implementations outermost, so that those of a case run one after the other."""

    def apply(test):
        for mark in [*EACH, pytest.mark.parametrize("implementation", implementations)]:
            test = mark(test)
        return test

    return apply


@each(FORWARD)
def test_forward(benchmark, implementation, shape, order, trials, device) -> None:
    t = Tensors(shape, order, trials, device)
    describe(benchmark, "forward", shape, order, trials, device, implementation)
    run = function_of(t, implementation)
    with torch.inference_mode():
        if implementation != "copy" and not (
            implementation.endswith("place") and trials == 1
        ):
            torch.testing.assert_close(run(t.x, t.residual), t.snl(t.x, t.residual))
        measure(benchmark, lambda: run(t.x, t.residual), trials, device)


@each(BACKWARD)
def test_forward_backward(
    benchmark, implementation, shape, order, trials, device
) -> None:
    t = Tensors(shape, order, trials, device)
    describe(
        benchmark, "forward+backward", shape, order, trials, device, implementation
    )
    run = function_of(t, implementation)
    x, residual = t.x.requires_grad_(), t.residual.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(x, residual), (x, residual), t.grad)

    measure(benchmark, step, trials, device)
