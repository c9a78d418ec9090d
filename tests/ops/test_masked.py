"""masked_relu and masked_poly: arguments, out=, memory orders, what is saved for the backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastbcd import ops
from fastbcd.ops import reference
from helpers.op_cases import MASKED, ORDERS, TRIALS, Case, arguments, compare_out, equal

pytestmark = pytest.mark.usefixtures("nan_empty")


@pytest.mark.parametrize("op", MASKED)
@pytest.mark.parametrize("trials", TRIALS)
def test_out_and_in_place(op, trials, device) -> None:
    for order in ORDERS:
        case = Case(op, "float32", trials, order, affine=True, residual=True, sizes=(2, 3, 5, 4, 3))
        assert not compare_out(case, device), case


def test_layer_coefficients(device) -> None:
    given = arguments(Case("masked_poly", sizes=(1, 3, 4, 3)), device)
    coef = torch.tensor([0.5, -1.0, 2.0], device=device, requires_grad=True)
    y = ops.masked_poly(given["x"], given["mask"], coef)
    by_channel = coef.detach()[:, None].repeat(1, 4)
    assert equal(y, reference.masked(given["x"], given["mask"], by_channel))
    y.sum().backward()
    assert coef.grad.shape == (3,)


def test_a_shared_x_equals_its_copies(device) -> None:
    given = arguments(Case("masked_relu", trials="shared x", sizes=(4, 3, 4, 3, 3)), device)
    x, mask = given["x"], given["mask"]
    copies = x.expand(4, *x.shape).clone()
    assert equal(ops.masked_relu(x, mask), ops.masked_relu(copies, mask))


def test_relu_saves_its_output_only() -> None:
    """x is saved only for the gradient of a scale."""
    given = arguments(Case("masked_relu", affine=True))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x = given["x"].clone().requires_grad_()
        y = ops.masked_relu(x, given["mask"], scale=given["scale"], shift=given["shift"])
    floats = [t for t in saved if t.is_floating_point() and t.numel() == x.numel()]
    assert [t.data_ptr() for t in floats] == [y.data_ptr()]


def test_memory_order_of_the_output(device) -> None:
    x = torch.randn(2, 4, 3, 5, device=device)
    mask = torch.ones(4, 3, 5, dtype=torch.bool, device=device)
    for t in (x, x.to(memory_format=torch.channels_last), x[:1], x[:, :, :, ::2]):
        y = ops.masked_relu(t, mask[:, :, : t.shape[3]])
        assert y.stride() == torch.relu(t).stride()
    stacked = torch.stack([x, x]).flatten(0, 1).to(memory_format=torch.channels_last)
    y = ops.masked_relu(stacked.view(2, 2, 4, 3, 5), mask.expand(2, 4, 3, 5), trials=True)
    assert y.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)


X, M = torch.zeros(2, 3, 4), torch.ones(3, 4, dtype=torch.bool)
ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"mask": M[:1]}, ValueError, r"mask has shape \(1, 4\).*x \(2, 3, 4\)"),
        ({"mask": M.float()}, TypeError, "mask is torch.float32.*bool"),
        ({"mask": M.to("meta")}, ValueError, "mask is on meta and x on cpu"),
        ({"x": X.long()}, TypeError, "x is torch.int64"),
        ({"scale": ONE}, ValueError, "scale was given without shift"),
        ({"shift": ONE}, ValueError, "shift was given without scale"),
        ({"scale": ONE, "shift": ONE[:2]}, ValueError, r"shift has shape \(2,\)"),
        ({"scale": ONE.long(), "shift": ONE}, TypeError, "scale is torch.int64"),
        ({"residual": torch.zeros(2, 3, 5)}, ValueError, r"residual has shape \(2, 3, 5\)"),
        ({"residual": X.double()}, ValueError, "residual is torch.float64"),
        ({"mask": M[None].expand(7, 3, 4), "trials": False}, ValueError, "expected"),
        ({"x": torch.zeros(3, 3, 4)}, ValueError, "two ways.*trials="),
        ({"out": torch.zeros(2, 3, 5)}, ValueError, r"out is \(2, 3, 5\)"),
        ({"x": X.clone().requires_grad_(), "out": X}, RuntimeError, "does not record gradients"),
        ({"out": X.clone().requires_grad_()}, RuntimeError, "does not record gradients"),
    ],
)
def test_bad_input(change, error, words) -> None:
    given = {"x": X, "mask": M, **change}
    with pytest.raises(error, match=words):
        ops.masked_relu(**given)
    for op, rows in (ops.masked_line, 2), (ops.masked_poly, 3):
        with pytest.raises(error, match=words):
            op(coef=torch.ones(rows, 3), **given)


@pytest.mark.parametrize("shape", [(3, 4), (2, 4), (4, 5), (3, 5, 1), ()])
def test_bad_coefficients(shape) -> None:
    for op in (ops.masked_line, ops.masked_poly):
        with pytest.raises(ValueError, match="coef has shape"):
            op(torch.zeros(2, 5), torch.ones(5, dtype=torch.bool), torch.ones(shape))


@pytest.mark.parametrize(("op", "rows"), [(ops.masked_line, 3), (ops.masked_poly, 2)])
def test_the_coefficients_of_another_degree_are_refused(op, rows) -> None:
    """Also where the fast path of small inferences would take them."""
    x, mask = torch.zeros(2, 5, 1, 1), torch.ones(5, 1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="coef has shape"):
        op(x, mask, torch.ones(rows, 5))


def test_a_line_needs_no_zeros(device) -> None:
    """An infinite z gives an infinite y and finite sums, where 0·z² would be NaN."""
    x = torch.tensor([[float("inf"), -2.0]], device=device, requires_grad=True)
    coef = torch.tensor([[0.5, 0.5], [2.0, 2.0]], device=device, requires_grad=True)
    y = ops.masked_line(x, torch.tensor([False, False], device=device), coef)
    assert y.tolist() == [[float("inf"), -3.5]]
    y.sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0]]
    assert coef.grad[0].tolist() == [1.0, 1.0]


def test_images_are_read_as_images() -> None:
    """[128, 128, 16, 16] is a batch of images, whatever B equals, unless trials=True."""
    x, mask = torch.randn(4, 4, 2, 3), torch.rand(4, 2, 3) > 0.5
    assert torch.equal(ops.masked_relu(x, mask), torch.where(mask, F.relu(x), x))
    stacked = torch.where(mask[:, None], F.relu(x), x)
    assert torch.equal(ops.masked_relu(x, mask, trials=True), stacked)
