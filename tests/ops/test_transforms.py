"""Derivatives of derivatives, torch.func and forward-mode AD of every differentiable op."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradgradcheck

from fastbcd import ops
from fastbcd.graph.fuse import NormActivation
from fastbcd.masking.activations import MaskedReLU
from fastbcd.ops import registry
from fastbcd.ops.saliency import saliency
from helpers.op_cases import (
    DIFFERENTIABLE,
    MASKED,
    ORDERS,
    TRIALS,
    Case,
    arguments,
    function_of,
    leaves,
)

ALL = pytest.mark.parametrize("op", DIFFERENTIABLE)
SIZES = (2, 2, 3, 2)


def cases(op: str) -> list[Case]:
    full = Case(op, "float64", affine=op in MASKED, residual=True, sizes=SIZES)
    bare = full._replace(affine=False, residual=False)
    if op not in MASKED:
        return [full, bare]
    return [bare, *(full._replace(trials=t, order=ORDERS[i % 3]) for i, t in enumerate(TRIALS))]


def positional(case: Case, seed: int = 0):
    """The op as a function of a tuple of tensors, and those tensors."""
    given = arguments(case, seed=seed)
    function, inputs = function_of(case, given), leaves(case, given)
    names = tuple(inputs)
    return lambda *values: function(**dict(zip(names, values, strict=True))), list(inputs.values())


@pytest.fixture
def plain(monkeypatch):
    """Switch the ops to the reference: `plain()`."""
    return lambda: monkeypatch.setattr(registry, "transformed", lambda: True)


@ALL
def test_gradients_of_gradients(op) -> None:
    for case in cases(op):
        function, inputs = positional(case)
        assert gradgradcheck(function, inputs), case


@ALL
def test_gradients_of_gradients_equal_those_of_the_reference(op, plain) -> None:
    def second(case) -> list[torch.Tensor]:
        function, inputs = positional(case)
        y = function(*inputs)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).double()
        first = torch.autograd.grad((y * weights).sin().sum(), inputs, create_graph=True)
        total = sum((d * d).sum() for d in first)
        return [*first, *torch.autograd.grad(total, inputs, allow_unused=True)]

    ours = [second(case) for case in cases(op)]
    plain()
    for case, found in zip(cases(op), ours, strict=True):
        for a, b in zip(found, second(case), strict=True):
            zero = torch.zeros(())
            torch.testing.assert_close(zero if a is None else a, zero if b is None else b)


@ALL
def test_torch_func(op) -> None:
    """grad, jacrev, vjp and vmap equal autograd, one call at a time."""
    for case in cases(op):
        function, inputs = positional(case)
        y = function(*inputs)
        grad = torch.randn_like(y)
        want = torch.autograd.grad(y, inputs, grad)
        with torch.no_grad():
            everything = tuple(range(len(inputs)))
            got = torch.func.grad(lambda *v, f=function, g=grad: (f(*v) * g).sum(), everything)(
                *inputs
            )
            value, pull = torch.func.vjp(function, *inputs)
            torch.testing.assert_close(value, y.detach())
            for a, b, c in zip(want, got, pull(grad), strict=True):
                torch.testing.assert_close(a, b)
                torch.testing.assert_close(a, c)
            jacobians = torch.func.jacrev(function, everything)(*inputs)
            for a, j in zip(want, jacobians, strict=True):
                torch.testing.assert_close(a, torch.tensordot(grad, j, grad.ndim))
            other = positional(case, seed=1)[1]
            stacked = [torch.stack(pair) for pair in zip(inputs, other, strict=True)]
            both = torch.func.vmap(function)(*stacked)
            torch.testing.assert_close(both, torch.stack([function(*inputs), function(*other)]))


@ALL
def test_forward_mode(op) -> None:
    for case in cases(op):
        function, inputs = positional(case)
        tangents = [torch.randn_like(t) for t in inputs]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, v) for t, v in zip(inputs, tangents, strict=True)]
            found = forward_ad.unpack_dual(function(*duals)).tangent
        y = function(*inputs)
        grad = torch.randn_like(y)
        products = zip(torch.autograd.grad(y, inputs, grad), tangents, strict=True)
        # grad · (J v) = (Jᵀ grad) · v
        torch.testing.assert_close((grad * found).sum(), sum((d * v).sum() for d, v in products))


@ALL
def test_batched_gradients(op) -> None:
    """torch.autograd.grad(is_grads_batched=True), which batches the backward."""
    case = cases(op)[0]
    function, inputs = positional(case)
    y = function(*inputs)
    grads = torch.randn(3, *y.shape, dtype=y.dtype)
    batched = torch.autograd.grad(y, inputs, grads, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, inputs, g, retain_graph=True) for g in grads]
    for a, b in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b))


def test_hessian_of_a_net() -> None:
    """A whole net with fused batch norm: Hessian-vector products equal those of plain modules."""
    torch.manual_seed(0)
    bn, act = torch.nn.BatchNorm2d(3), MaskedReLU((3, 4, 4))
    act.mask[1] = False
    x = torch.randn(5, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    v = torch.randn_like(x)
    found = []
    for net in (NormActivation(bn, act), lambda x: act(bn(x))):
        (g,) = torch.autograd.grad(net(x).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((g * v).sum(), [x, bn.weight, bn.bias]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_out_is_refused_under_transforms() -> None:
    x, mask = torch.randn(3, 4), torch.ones(4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match=r"does not work under torch\.func"):
        torch.func.vmap(lambda x: ops.masked_relu(x[None], mask, out=torch.empty(1, 4)))(x)


def test_saliency_refuses_second_derivatives() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    anchor, totals = torch.zeros((), requires_grad=True), torch.zeros(4).double()
    y = saliency(x, torch.ones(4, dtype=torch.bool), anchor, totals, absolute=True)
    (g,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
