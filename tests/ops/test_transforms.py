"""Derivatives of derivatives; torch.func and forward-mode AD are refused."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradgradcheck

from fastbcd import ops
from fastbcd.graph.fuse import NormActivation
from fastbcd.masking.activations import MaskedReLU
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


@ALL
def test_gradients_of_gradients(op) -> None:
    for case in cases(op):
        function, inputs = positional(case)
        assert gradgradcheck(function, inputs), case


@ALL
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_torch_refuses_its_transforms(op, transform) -> None:
    function, inputs = positional(cases(op)[0])
    if transform is torch.func.vmap:
        inputs = [t[None] for t in inputs]
    with pytest.raises(RuntimeError, match=r"functorch transforms \(vmap, grad, jvp, jacrev"):
        transform(lambda *values: function(*values).sum())(*inputs)


@ALL
def test_torch_refuses_forward_mode(op) -> None:
    function, inputs = positional(cases(op)[0])
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t.detach(), torch.ones_like(t)) for t in inputs]
        with pytest.raises(NotImplementedError, match="implement the jvp function"):
            function(*duals)


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
