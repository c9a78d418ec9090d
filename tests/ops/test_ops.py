"""Every op against reference.py, forward and backward, on every device that is present."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fastbcd import kernels, ops
from helpers.op_cases import (
    DIFFERENTIABLE,
    MASKED,
    ORDERS,
    SITES,
    TRIALS,
    UNSTACKED,
    Case,
    arguments,
    compare,
    equal,
    expected,
    formula,
    function_of,
    leaves,
    results,
)

DTYPES = ("float32", "float64", "float16", "bfloat16")
ALL = (*MASKED, *UNSTACKED)
pytestmark = pytest.mark.usefixtures("nan_empty")


def dtypes_of(device: str) -> tuple[str, ...]:
    return DTYPES if device == "cpu" else tuple(d for d in DTYPES if d != "float64")


def test_kernels_are_in_use() -> None:
    """Otherwise this file would compare the reference with itself."""
    backend = kernels.TRITON if kernels.INTERPRETED else kernels.CPU
    assert backend.module is not None, backend.reason
    assert kernels.module_for(torch.empty(1)) is backend.module


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("op", MASKED)
def test_masked_ops_equal_the_reference(op, site, trials, device) -> None:
    for i, (dtype, order) in enumerate(product(dtypes_of(device), ORDERS)):
        for mask_order, affine, residual in product(ORDERS[:2], (False, True), (False, True)):
            case = Case(
                op, dtype, trials, order, mask_order, affine, residual, (4, 3, *site), i % 2 == 0
            )
            assert not compare(case, device, seed=i), case


@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("op", UNSTACKED)
def test_ops_without_trials_equal_the_reference(op, site, device) -> None:
    for i, (dtype, order) in enumerate(product(dtypes_of(device), ORDERS)):
        for mask_order, residual in product(ORDERS[:2], (False, True)):
            case = Case(
                op, dtype, "none", order, mask_order, False, residual, (1, 5, *site), i % 2 == 0
            )
            assert not compare(case, device, seed=i), case


@pytest.mark.parametrize("op", ALL)
@pytest.mark.parametrize(("site", "batch"), [((64, 32, 32), 19), ((5000,), 3), ((3, 45, 31), 33)])
def test_larger_than_a_tile(op, site, batch, device) -> None:
    """Several tiles, chunks of the batch and threads, in both orders and mask orders."""
    for order, mask_order in product(ORDERS[:2], repeat=2):
        case = Case(op, "float32", "none", order, mask_order, op in MASKED, True, (1, batch, *site))
        assert not compare(case, device), case


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_only_x_has_a_gradient(op, device) -> None:
    for trials in TRIALS if op in MASKED else ("none",):
        case = Case(op, trials=trials, affine=op in MASKED, residual=True, frozen=True)
        assert not compare(case, device), case


@pytest.mark.parametrize("op", ALL)
def test_sums_do_not_depend_on_the_number_of_threads(op) -> None:
    case = Case(op, affine=op in MASKED, residual=True, sizes=(1, 50, 16, 32, 32))
    given, found, before = arguments(case), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(case, given))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(found[0][name], value) for name, value in other.items())


@pytest.mark.parametrize("op", [*MASKED, *UNSTACKED])
@pytest.mark.parametrize("sizes", [(2, 0, 3, 4), (2, 2, 3, 0), (2, 2, 0), (0, 2, 3), (2, 0, 0)])
def test_no_elements(op, sizes, device) -> None:
    for trials in TRIALS if op in MASKED else ("none",):
        case = Case(op, trials=trials, affine=op in MASKED, residual=True, sizes=sizes)
        assert not compare(case, device), case


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_formulas_equal_autograd(op) -> None:
    """The reference's backward formulas are the derivatives of its forward."""
    for trials in TRIALS if op in MASKED else ("none",):
        case = Case(op, "float64", trials, affine=op in MASKED, residual=True, sizes=(4, 3, 3, 4))
        given = arguments(case)
        inputs = leaves(case, given)
        inputs.pop("aux", None)  # a straight-through gradient is not a derivative
        y = formula(case, {**given, **inputs})
        grads = torch.autograd.grad(y, list(inputs.values()), given["grad"].expand_as(y))
        found = {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}
        found["y"] = y.detach()
        for name, want in expected(case, given, found).items():
            torch.testing.assert_close(found[name], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
@pytest.mark.parametrize("order", ORDERS[:2])
def test_gradcheck(op, order) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False  # gradcheck uses torch.empty
    for trials in TRIALS if op in MASKED else ("none",):
        case = Case(op, "float64", trials, order, affine=op in MASKED, residual=True,
                    sizes=(4, 2, 3, 2, 2))  # fmt: skip
        given = arguments(case)
        function, inputs = function_of(case, given), leaves(case, given)
        if op == "indicator_poly":  # a straight-through gradient is not a derivative
            inputs["aux"].requires_grad_(False)
        assert torch.autograd.gradcheck(
            lambda *values, f=function, names=tuple(inputs): f(
                **dict(zip(names, values, strict=True))
            ),
            list(inputs.values()),
        )


@pytest.mark.parametrize("op", [*MASKED, "soft_relu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_error_is_at_most_twice_eagers(op, dtype, device) -> None:
    """Against fp32: no worse than eager PyTorch in the same precision, forward and backward."""
    case = Case(op, dtype, affine=op in MASKED, residual=True, sizes=(1, 8, 16, 8, 8))
    given = arguments(case, device)
    names = list(leaves(case, given))
    low = {n: given[n].to(given["x"].dtype) for n in names}
    high = {n: given[n].float() for n in names}

    def run(function, inputs) -> list[torch.Tensor]:
        inputs = {n: t.detach().clone().requires_grad_() for n, t in inputs.items()}
        y = function(**inputs)
        (y.float() ** 2).sum().backward()
        return [y.detach(), inputs["x"].grad, inputs["residual"].grad]

    def eager(x, residual, scale=None, shift=None, coef=None, alpha=None):
        if op == "soft_relu":
            z = x + residual
            return alpha * torch.relu(z) + (1 - alpha) * z
        z = x * scale[:, None, None] + shift[:, None, None] + residual
        other = z
        if coef is not None:
            c0, c1, *c2 = coef[:, :, None, None]
            other = (c2[0] * z + c1) * z + c0 if c2 else c1 * z + c0
        return torch.where(given["mask"].bool(), torch.relu(z), other)

    truth = run(eager, high)
    ours = run(function_of(case, given), {n: given[n] for n in names})
    plain = run(eager, low)
    for a, b, t in zip(ours, plain, truth, strict=True):
        assert (a.float() - t).abs().max() <= 2 * (b.float() - t).abs().max()


def test_like_torch_relu_at_special_values(device) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, inf, -inf, 0.0, -0.0, 1.0, -1.0]], device=device, requires_grad=True)
    kept = torch.ones(7, dtype=torch.bool, device=device)
    y, truth = ops.masked_relu(x, kept), torch.relu(x)
    assert equal(y, truth)
    grads = [torch.autograd.grad(t.sum(), x)[0] for t in (y, truth)]
    assert torch.equal(*grads)
    assert equal(ops.masked_relu(x, ~kept), x)
    identity = torch.autograd.grad(ops.masked_relu(x, ~kept).sum(), x)[0]
    assert torch.equal(identity, torch.ones_like(x))
