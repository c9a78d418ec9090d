"""Batch norm + residual + masked activation: one pass against what a user would write.

    make bench                                             the table
    pytest benchmarks/test_activations.py -k "14x14"       one shape

Peers, all computing the same function of the same tensors:
    snl        batch norm, add, relu(x)*a + (1-a)*r(x): the formula of SNL and of the authors' BCD
    eager      batch norm, add, and the best eager form: maximum(x, bound) with bound 0 or -inf for
               the identity, torch.where for a line and a quadratic
    compiled   torch.compile of `eager`
    copy       y.copy_(x) into an existing tensor: the limit set by memory
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbcd.graph.fuse import NormActivation
from fastbcd.masking.activations import MaskedActivation, activation_type
from fastbcd.ops.masked import masked

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SHAPES = [(128, 64, 32, 32), (128, 128, 16, 16), (128, 256, 8, 8), (128, 512, 4, 4),
          (64, 256, 14, 14)]  # fmt: skip
FORWARD = ["snl", "eager", "compiled", "fastbcd", "fastbcd in place", "copy"]
REPLACEMENTS = {"identity": 0, "line": 2, "quadratic": 3}  # rows of coef
BACKWARD = ["snl", "eager", "compiled", "fastbcd"]


class Tensors:
    """One set of inputs, shared by all implementations of a case."""

    def __init__(
        self, shape: tuple[int, ...], order: str, trials: int, rows: int, device: str
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
        self.bits = self.mask.unsqueeze(-4)
        alpha = self.mask.float().unsqueeze(-4)  # [T, 1, C, H, W]
        bound = torch.where(self.mask, 0.0, float("-inf")).unsqueeze(-4)
        self.alpha, self.bound = (
            t.movedim(-3, -1).contiguous().movedim(-1, -3)
            if order == "channels_last"
            else t
            for t in (alpha, bound)
        )
        self.out = torch.empty_like(self.grad)
        self.train = False
        self.coef = torch.randn(rows, c, device=device) if rows else None
        self.module = NormActivation(nn.BatchNorm2d(c), activation(rows, shape[1:]))
        self.module.to(device).act.mask = self.mask
        if self.coef is not None:
            self.module.act.coef.data = self.coef

    def normalised(self, x: Tensor, residual: Tensor) -> Tensor:
        z = F.batch_norm(
            x, self.mean, self.var, self.weight, self.bias, training=self.train
        )
        return z + residual

    def replaced(self, z: Tensor) -> Tensor:
        if self.coef is None:
            return z
        total = self.coef[-1, :, None, None] * z
        for c in self.coef[1:-1].flip(0):
            total = (total + c[:, None, None]) * z
        return total + self.coef[0, :, None, None]

    def snl(self, x: Tensor, residual: Tensor) -> Tensor:
        z = self.normalised(x, residual)
        return torch.relu(z) * self.alpha + (1 - self.alpha) * self.replaced(z)

    def eager(self, x: Tensor, residual: Tensor) -> Tensor:
        z = self.normalised(x, residual)
        if self.coef is None:
            return torch.maximum(z, self.bound)
        return torch.where(self.bits, torch.relu(z), self.replaced(z))

    def fastbcd(self, x: Tensor, residual: Tensor, out: Tensor | None = None) -> Tensor:
        if self.train:
            return self.module(x, residual)
        return masked(
            x,
            self.mask,
            self.coef,
            scale=self.scale,
            shift=self.shift,
            residual=residual,
            out=out,
        )


def activation(rows: int, shape: tuple[int, ...]) -> MaskedActivation:
    return activation_type({0: "identity", 2: "line", 3: "poly"}[rows])(shape)


def draw_small(c: int, device: str) -> Tensor:
    return torch.randn(c, device=device)


def function_of(t: Tensors, implementation: str) -> Callable[[Tensor, Tensor], Tensor]:
    if implementation == "compiled":
        torch._dynamo.reset()
        return torch.compile(t.eager, dynamic=False)
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
    pytest.mark.parametrize("replacement", REPLACEMENTS),
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


def describe(benchmark, mode: str, **case) -> None:
    shape = "x".join(map(str, case["shape"]))
    benchmark.group = (
        f"{mode} {case['replacement']} {shape} {case['order']} T={case['trials']} "
        f"{case['device']}"
    )
    benchmark.extra_info.update(mode=mode, **{k: str(v) for k, v in case.items()})


def each(implementations: list[str]):
    """All cases; the implementations outermost, so that those of a case run one after the other."""

    def apply(test):
        for mark in [*EACH, pytest.mark.parametrize("implementation", implementations)]:
            test = mark(test)
        return test

    return apply


@each(FORWARD)
def test_forward(
    benchmark, implementation, shape, order, trials, replacement, device
) -> None:
    t = Tensors(shape, order, trials, REPLACEMENTS[replacement], device)
    describe(
        benchmark, "forward", shape=shape, order=order, trials=trials,
        replacement=replacement, device=device, implementation=implementation,
    )  # fmt: skip
    run = function_of(t, implementation)
    with torch.inference_mode():
        if implementation != "copy" and not (
            implementation.endswith("place") and trials == 1
        ):
            torch.testing.assert_close(
                run(t.x, t.residual), t.snl(t.x, t.residual), rtol=1e-4, atol=1e-4
            )
        measure(benchmark, lambda: run(t.x, t.residual), trials, device)


@each(BACKWARD)
def test_forward_backward(
    benchmark, implementation, shape, order, trials, replacement, device
) -> None:
    t = Tensors(shape, order, trials, REPLACEMENTS[replacement], device)
    describe(
        benchmark, "forward+backward", shape=shape, order=order, trials=trials,
        replacement=replacement, device=device, implementation=implementation,
    )  # fmt: skip
    measure_steps(benchmark, t, implementation, trials, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("implementation", ["eager", "compiled", "fastbcd"])
def test_train(benchmark, implementation, shape, replacement, device) -> None:
    """The batch norm in train mode, forward and backward, channels_last."""
    t = Tensors(shape, "channels_last", 1, REPLACEMENTS[replacement], device)
    t.train = True
    describe(
        benchmark, "training", shape=shape, order="channels_last", trials=1,
        replacement=replacement, device=device, implementation=implementation,
    )  # fmt: skip
    measure_steps(benchmark, t, implementation, 1, device)


def measure_steps(benchmark, t, implementation, trials, device) -> None:
    """Forward and backward, with the gradients of everything that a net trains."""
    run = function_of(t, implementation)
    leaves = [t.x.requires_grad_(), t.residual.requires_grad_()]
    if t.coef is not None and not (t.train and implementation == "fastbcd"):
        leaves.append(t.coef.requires_grad_())
    if t.train:
        leaves += [t.weight.requires_grad_(), t.bias.requires_grad_()]
        if implementation == "fastbcd":
            leaves[2:] = t.module.parameters()

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(t.x, t.residual), leaves, t.grad)

    measure(benchmark, step, trials, device)
