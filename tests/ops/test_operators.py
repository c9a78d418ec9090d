"""The ops as torch operators: opcheck, torch.compile, torch.export, AMP."""

from __future__ import annotations

import warnings

import pytest
import torch

from fastbcd import MaskedPoly, MaskedReLU, ops
from helpers.op_cases import TRIALS, equal, make_call

BOTH = pytest.mark.parametrize("poly", [False, True], ids=["relu", "poly"])
ORDERS = pytest.mark.parametrize("order", ["contiguous", "channels_last", "sliced"])


@BOTH
@ORDERS
@pytest.mark.parametrize("trials", TRIALS)
def test_opcheck(poly, order, trials, device) -> None:
    for affine, residual in ((False, False), (True, True)):
        call = make_call(
            (3, 4, 2), trials=trials, order=order, affine=affine, residual=residual, device=device
        )
        leaves = call.leaves(poly)
        a = call._replace(**leaves)
        tail = (a.scale, a.shift, a.residual, a.trials)
        op = torch.ops.fastbcd.masked_poly if poly else torch.ops.fastbcd.masked_relu
        arguments = (a.x, a.mask, a.coef, *tail) if poly else (a.x, a.mask, *tail)
        torch.library.opcheck(op.default, arguments)


@BOTH
@ORDERS
def test_opcheck_backward_and_out(poly, order, device) -> None:
    call = make_call((3, 4, 2), order=order, device=device)
    y = call.op(poly)
    tail = (call.scale, call.shift, call.residual, call.trials)
    if poly:
        torch.library.opcheck(
            torch.ops.fastbcd.masked_poly_backward.default,
            (torch.randn_like(y), call.x, call.mask, call.coef, *tail, True),
        )
        torch.library.opcheck(
            torch.ops.fastbcd.masked_poly_out.default,
            (call.x, call.mask, call.coef, *tail, torch.empty_like(y)),
        )
    else:
        torch.library.opcheck(
            torch.ops.fastbcd.masked_relu_backward.default,
            (torch.randn_like(y), y, call.mask, call.x, call.scale, False, False, False, True),
        )
        torch.library.opcheck(
            torch.ops.fastbcd.masked_relu_out.default,
            (call.x, call.mask, *tail, torch.empty_like(y)),
        )


@BOTH
@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
@pytest.mark.parametrize("trials", ["single", "shared"])
def test_compile_fullgraph(poly, order, trials, device) -> None:
    call = make_call((4, 3, 3), order=order, trials=trials, device=device)

    def net(x, coef, scale, shift, residual):
        y = call.op(poly, x=x * 2, coef=coef, scale=scale, shift=shift, residual=residual)
        return y.tanh()

    def run(function):
        leaves = call._replace(coef=call.coef.clone()).leaves(True)
        y = function(**leaves)
        y.square().sum().backward()
        grads = [t.grad for n, t in leaves.items() if poly or n != "coef"]
        return [y.detach(), *grads]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own deprecations
        compiled = run(torch.compile(net, fullgraph=True))
    for a, b in zip(compiled, run(net), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [MaskedReLU, MaskedPoly])
def test_export(kind, device) -> None:
    act = kind((4, 3, 3)).to(device)
    act.mask[1:3] = False
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), act).to(device).eval()
    x = torch.randn(3, 2, 5, 5, device=device)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
    assert any("fastbcd.masked" in str(n.target) for n in program.graph.nodes)
    for images in (x, torch.randn(5, 2, 5, 5, device=device)):
        torch.testing.assert_close(program.module()(images), net(images))


def test_raw_operators_have_gradients() -> None:
    """Calling torch.ops directly must not lose the gradient silently."""
    call = make_call((3, 2), affine=False, residual=False)
    x = call.x.clone().requires_grad_()
    torch.ops.fastbcd.masked_relu.default(x, call.mask, None, None, None, False).sum().backward()
    assert x.grad is not None


def test_autocast(device) -> None:
    """In a bf16 region the op takes what the convolution gives and keeps its dtype."""
    call = make_call((4, 3, 3), dtype=torch.bfloat16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert equal(call.op(False), call.truth(False))


def test_inference_mode(device) -> None:
    call = make_call((4, 3, 3), device=device)
    with torch.inference_mode():
        x = call.x.clone()
        y = ops.masked_relu(x, call.mask, out=x)
    assert y is x
