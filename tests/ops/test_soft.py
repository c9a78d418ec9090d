"""soft_relu and indicator_poly: the published formulas, and bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastbcd import ops
from helpers.op_cases import Case, arguments, equal


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
    given = arguments(Case("soft_relu", residual=True))
    x, residual = given["x"], given["residual"]
    for alpha, kept in ((1.0, True), (0.0, False)):
        mask = torch.full(x.shape[1:], kept)
        y = ops.soft_relu(x, torch.full(mask.shape, alpha), residual=residual)
        assert equal(y, ops.masked_relu(x, mask, residual=residual))


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
