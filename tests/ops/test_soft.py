"""The soft ReLU and the indicator polynomial: kernels, formulas, autograd, torch.compile."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastbcd import ops
from fastbcd.ops import reference
from helpers.op_cases import SITES, Call, channels_last, equal, make_call

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ORDERS = ["contiguous", "channels_last", "sliced"]
OPS = pytest.mark.parametrize("op", ["soft", "indicator"])
pytestmark = pytest.mark.usefixtures("nan_empty")


def units(call: Call, seed: int = 0, last: bool = False) -> Tensor:
    """Numbers around 0 .. 1 for every unit, in either memory order."""
    g = torch.Generator().manual_seed(seed)
    t = torch.rand(call.mask.shape, generator=g, dtype=torch.float64) * 1.4 - 0.2
    t = t.to(call.coef.dtype)
    return (channels_last(t, t.ndim) if last else t).to(call.x.device)


def leaves_of(op: str, call: Call, numbers: Tensor) -> dict[str, Tensor]:
    """What has a gradient, by name, memory order kept."""
    given = {"x": call.x, "units": numbers, "residual": call.residual}
    if op == "indicator":
        given["coef"] = call.coef
    return {n: t.detach().clone().requires_grad_() for n, t in given.items() if t is not None}


def run(op: str, call: Call, leaves: dict[str, Tensor]) -> Tensor:
    residual = leaves.get("residual")
    if op == "soft":
        return ops.soft_relu(leaves["x"], leaves["units"], residual=residual)
    return ops.indicator_poly(
        leaves["x"], call.mask, leaves["coef"], leaves["units"], residual=residual
    )


def truth(op: str, call: Call, numbers: Tensor) -> Tensor:
    if op == "soft":
        return reference.soft_relu(call.x, numbers, call.residual)
    return reference.masked_poly(call.x, call.mask, call.coef, None, None, call.residual)


def truth_grads(op: str, call: Call, numbers: Tensor, grad: Tensor) -> dict[str, Tensor]:
    if op == "soft":
        names, values = (
            ("x", "units"),
            reference.soft_relu_backward(grad, call.x, numbers, call.residual),
        )
    else:
        names, values = (
            ("x", "coef", "units"),
            reference.indicator_poly_backward(
                grad, call.x, call.mask, call.coef, numbers, call.residual
            ),
        )
    found = dict(zip(names, values, strict=True))
    return {**found, "residual": found["x"]}


def check(op: str, call: Call, numbers: Tensor) -> None:
    leaves = leaves_of(op, call, numbers)
    y = run(op, call, leaves)
    assert equal(y, truth(op, call, numbers))
    grad = y.detach().sin()
    found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad), strict=True))
    wanted = truth_grads(op, call, numbers, grad)
    for name, value in found.items():
        if name in ("x", "residual"):
            assert equal(value, wanted[name]), name
        else:  # sums over the batch: equal up to their order
            eps = torch.finfo(value.dtype).eps
            largest = 1 + wanted[name].abs().max().item() if value.numel() else 1
            torch.testing.assert_close(value, wanted[name], rtol=8 * eps, atol=64 * eps * largest)


@OPS
@pytest.mark.parametrize("site", SITES, ids=str)
def test_kernels_equal_the_reference(op, site, device) -> None:
    for i, (dtype, order) in enumerate(product(DTYPES, ORDERS)):
        if dtype == torch.float64 and device != "cpu":
            continue
        for residual, last in product((False, True), repeat=2):
            call = make_call(
                site, batch=5, dtype=dtype, order=order, residual=residual, affine=False,
                mask_order=("channels_last", "uint8")[i % 2], device=device, seed=i,
            )  # fmt: skip
            check(op, call, units(call, i, last))


@OPS
@pytest.mark.parametrize(("site", "batch"), [((64, 32, 32), 19), ((5000,), 3), ((3, 45, 31), 33)])
def test_larger_than_a_tile(op, site, batch, device) -> None:
    for order in ("contiguous", "channels_last"):
        call = make_call(site, batch=batch, order=order, affine=False, device=device)
        check(op, call, units(call))


@OPS
def test_special_values(op, device) -> None:
    """NaN, infinities and zeros go the way of the formula, forward and in dx."""
    call = make_call((16, 8, 8), special=True, affine=False, residual=False, device=device)
    numbers = units(call)
    leaves = leaves_of(op, call, numbers)
    y = run(op, call, leaves)
    assert equal(y, truth(op, call, numbers))
    grad = torch.ones_like(y)
    (dx,) = torch.autograd.grad(y, [leaves["x"]], grad)
    assert equal(dx, truth_grads(op, call, numbers, grad)["x"])


@OPS
@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 3, 4), (2, 3, 0), (0, 0)])
def test_zero_size(op, shape, device) -> None:
    call = Call(
        torch.zeros(shape, device=device),
        torch.ones(shape[1:], dtype=torch.bool, device=device),
        torch.ones(3, shape[1], device=device),
        None, None, None, False,
    )  # fmt: skip
    leaves = leaves_of(op, call, torch.ones(shape[1:], device=device))
    y = run(op, call, leaves)
    y.sum().backward()
    assert y.shape == shape
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in leaves.values())


def test_the_published_formula_of_snl() -> None:
    """y = a·relu(x) + (1-a)·x by autograd, to rounding; da = Σ_batch g·relu(-x)."""
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    alpha = torch.rand(3, 4, 4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    plain = alpha * torch.relu(x) + (1 - alpha) * x
    ours = ops.soft_relu(x, alpha)
    torch.testing.assert_close(ours, plain)
    for a, b in zip(
        torch.autograd.grad(ours, [x, alpha], grad),
        torch.autograd.grad(plain, [x, alpha], grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    (dalpha,) = torch.autograd.grad(ops.soft_relu(x, alpha), [alpha], grad)
    torch.testing.assert_close(dalpha, (grad * torch.relu(-x)).sum(0).detach())


class StraightThrough(torch.autograd.Function):
    """The bit forward, softplus(aux) times its gradient backward: AutoReP's estimator."""

    @staticmethod
    def forward(ctx, aux, bit):
        ctx.save_for_backward(aux)
        return bit.clone()

    @staticmethod
    def backward(ctx, grad):
        return F.softplus(*ctx.saved_tensors) * grad, None


def test_the_published_formula_of_autorep() -> None:
    """y = m·relu(x) + (1-m)·poly(x) with a straight-through m, by autograd."""
    double = {"dtype": torch.float64}
    x = torch.randn(6, 3, 4, 4, **double, requires_grad=True)
    aux = torch.randn(3, 4, 4, **double, requires_grad=True)
    coef = torch.randn(3, 3, **double, requires_grad=True)
    mask, grad = torch.rand(3, 4, 4) > 0.5, torch.randn(6, 3, 4, 4, **double)
    c0, c1, c2 = coef[:, :, None, None]
    m = StraightThrough.apply(aux, mask.double())
    plain = m * torch.relu(x) + (1 - m) * (c2 * x**2 + c1 * x + c0)
    ours = ops.indicator_poly(x, mask, coef, aux)
    torch.testing.assert_close(ours, plain)
    for a, b in zip(
        torch.autograd.grad(ours, [x, coef, aux], grad),
        torch.autograd.grad(plain, [x, coef, aux], grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_ends_of_the_soft_relu_are_the_masked_relu() -> None:
    call = make_call((4, 5, 3), affine=False)
    for alpha, kept in ((1.0, True), (0.0, False)):
        mask = torch.full(call.mask.shape, kept)
        y = ops.soft_relu(call.x, torch.full(mask.shape, alpha), residual=call.residual)
        assert equal(y, ops.masked_relu(call.x, mask, residual=call.residual))


@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
def test_gradcheck(order) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False  # gradcheck's own torch.empty
    call = make_call((3, 2, 2), batch=2, dtype=torch.float64, order=order, affine=False)
    numbers = units(call)
    for op in ("soft", "indicator"):
        leaves = leaves_of(op, call, numbers)
        fixed = {} if op == "soft" else {"units": leaves.pop("units").detach()}
        assert torch.autograd.gradcheck(
            lambda *v, op=op, leaves=leaves, fixed=fixed: run(
                op, call, {**dict(zip(leaves, v, strict=True)), **fixed}
            ),
            list(leaves.values()),
        )


@OPS
@pytest.mark.parametrize("order", ORDERS)
def test_opcheck(op, order, device) -> None:
    for residual in (False, True):
        call = make_call((3, 4, 2), order=order, affine=False, residual=residual, device=device)
        numbers = units(call, last=order == "contiguous")
        a = leaves_of(op, call, numbers)
        x, alpha, r = a["x"], a["units"], a.get("residual")
        grad = torch.randn(call.x.shape, device=device)
        if op == "soft":
            torch.library.opcheck(torch.ops.fastbcd.soft_relu.default, (x, alpha, r))
            torch.library.opcheck(
                torch.ops.fastbcd.soft_relu_backward.default,
                (grad, call.x, numbers, call.residual),
            )
        else:
            torch.library.opcheck(
                torch.ops.fastbcd.indicator_poly.default, (x, call.mask, a["coef"], alpha, r)
            )
            torch.library.opcheck(
                torch.ops.fastbcd.indicator_poly_backward.default,
                (grad, call.x, call.mask, call.coef, numbers, call.residual),
            )


@OPS
@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
def test_compile_fullgraph(op, order, device) -> None:
    call = make_call((4, 3, 3), order=order, affine=False, device=device)
    numbers = units(call)

    def step(function):
        leaves = leaves_of(op, call, numbers)
        y = function(leaves)
        y.square().sum().backward()
        return [y.detach(), *(t.grad for t in leaves.values())]

    def net(leaves):
        return run(op, call, {**leaves, "x": leaves["x"] * 2}).tanh()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own deprecations
        compiled = step(torch.compile(net, fullgraph=True))
    for a, b in zip(compiled, step(net), strict=True):
        torch.testing.assert_close(a, b)


@OPS
def test_sums_do_not_depend_on_the_number_of_threads(op) -> None:
    call = make_call((16, 32, 32), batch=50, affine=False)
    numbers = units(call)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaves = leaves_of(op, call, numbers)
            run(op, call, leaves).sin().sum().backward()
            results.append([t.grad for t in leaves.values()])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_error_is_at_most_twice_eagers(dtype, device) -> None:
    call = make_call((16, 8, 8), batch=8, dtype=dtype, affine=False, device=device)
    alpha = units(call)

    def graded(x, residual, alpha, function) -> list[Tensor]:
        x, alpha = (t.detach().clone().requires_grad_() for t in (x, alpha))
        y = function(x, alpha, residual)
        (y.float() ** 2).sum().backward()
        return [y, x.grad, alpha.grad]

    def eager(x, alpha, residual):
        z = x + residual
        return alpha * torch.relu(z) + (1 - alpha) * z

    want = graded(call.x.float(), call.residual.float(), alpha, eager)
    ours = graded(call.x, call.residual, alpha, lambda x, a, r: ops.soft_relu(x, a, residual=r))
    plain = graded(call.x, call.residual, alpha.to(dtype), eager)
    for a, b, t in zip(ours, plain, want, strict=True):
        assert (a.float() - t).abs().max() <= 2 * (b.float() - t).abs().max()


def test_a_residual_gets_the_gradient_of_x() -> None:
    call = make_call((3, 4), affine=False)
    leaves = leaves_of("soft", call, units(call))
    run("soft", call, leaves).sin().sum().backward()
    assert torch.equal(leaves["x"].grad, leaves["residual"].grad)


X, A, M = torch.zeros(2, 3, 4), torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": X.long()}, TypeError, "x is torch.int64"),
        ({"alpha": A[:1]}, ValueError, r"has shape \(1, 4\); x \(2, 3, 4\) needs \(3, 4\)"),
        ({"alpha": A.long()}, TypeError, "is torch.int64; it must be floating-point"),
        ({"alpha": A.to("meta")}, ValueError, "is on meta and x on cpu"),
        ({"residual": X[:1]}, ValueError, r"residual has shape \(1, 3, 4\)"),
        ({"residual": X.double()}, ValueError, "residual is torch.float64"),
    ],
)
def test_bad_input(change, error, words) -> None:
    a = {"x": X, "alpha": A, "residual": None, **change}
    with pytest.raises(error, match=words):
        ops.soft_relu(a["x"], a["alpha"], residual=a["residual"])
    with pytest.raises(error, match=words):
        ops.indicator_poly(a["x"], M, torch.ones(3, 3), a["alpha"], residual=a["residual"])


def test_bad_mask_and_coefficients() -> None:
    with pytest.raises(TypeError, match=r"mask is torch\.float32"):
        ops.indicator_poly(X, A, torch.ones(3, 3), A)
    with pytest.raises(ValueError, match="coef has shape"):
        ops.indicator_poly(X, M, torch.ones(3, 4), A)
