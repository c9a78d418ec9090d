"""The fused ops against reference.py: every kernel of every device that is present."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastbcd import kernels, ops
from fastbcd.ops import reference
from helpers.op_cases import SITES, TRIALS, Call, channels_last, equal, make_call

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BOTH = pytest.mark.parametrize("poly", [False, True], ids=["relu", "poly"])
pytestmark = pytest.mark.usefixtures("nan_empty")


def dtypes_of(device: str) -> list[torch.dtype]:
    return [d for d in DTYPES if d != torch.float64 or device == "cpu"]


def test_kernels_are_in_use() -> None:
    """Without this the whole file would compare the reference with itself."""
    assert kernels.CPU.module is not None, kernels.CPU.reason
    assert (
        kernels.choose(torch.empty(1))
        is (kernels.TRITON if kernels.INTERPRETED else kernels.CPU).module
    )


@BOTH
@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("site", SITES, ids=str)
def test_forward_equals_the_reference(site, trials, poly, device) -> None:
    for i, dtype in enumerate(dtypes_of(device)):
        for order in ("contiguous", "channels_last", "sliced"):
            for mask_order in ("contiguous", "channels_last", "uint8"):
                for affine, residual in (
                    (False, False),
                    (True, False),
                    (False, True),
                    (True, True),
                ):
                    call = make_call(
                        site, trials=trials, dtype=dtype, order=order, mask_order=mask_order,
                        affine=affine, residual=residual, special=i % 2 == 0, device=device, seed=i,
                    )  # fmt: skip
                    found = call.op(poly)
                    assert equal(found, call.truth(poly)), (
                        dtype,
                        order,
                        mask_order,
                        affine,
                        residual,
                    )


@BOTH
@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("site", SITES, ids=str)
def test_backward_equals_the_reference(site, trials, poly, device) -> None:
    for i, dtype in enumerate(dtypes_of(device)):
        for order in ("contiguous", "channels_last", "sliced"):
            for affine, residual in ((False, False), (True, False), (False, True), (True, True)):
                call = make_call(
                    site, trials=trials, dtype=dtype, order=order, affine=affine,
                    mask_order="channels_last" if i % 2 else "contiguous",
                    residual=residual, device=device, seed=i,
                )  # fmt: skip
                check_backward(call, poly)


def check_backward(call: Call, poly: bool) -> None:
    leaves = call.leaves(poly)
    y = call.op(poly, **leaves)
    grad = y.detach().sin()
    found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad), strict=True))
    truth = call.truth_grads(poly, grad)
    for name, value in found.items():
        summed = name not in ("x", "residual") or call.shared(leaves[name])
        if summed:  # sums over batch or trials: equal up to their order
            eps = torch.finfo(value.dtype).eps
            largest = 1 + truth[name].abs().max().item() if value.numel() else 1
            assert_close(value, truth[name], rtol=8 * eps, atol=32 * eps * largest)
        else:
            assert equal(value, truth[name]), name
            assert value.stride() == y.stride() or not y.is_contiguous() or value.is_contiguous()


def assert_close(a, b, **tolerance) -> None:
    torch.testing.assert_close(a, b, **tolerance)


@BOTH
@pytest.mark.parametrize("trials", TRIALS)
def test_formulas_equal_autograd(poly, trials) -> None:
    """The reference's backward formulas are the derivatives of its forward."""
    call = make_call((3, 4, 2), trials=trials, dtype=torch.float64)
    leaves = call.leaves(poly)
    y = call._replace(**leaves).truth(poly)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, list(leaves.values()), grad)
    truth = call.truth_grads(poly, grad)
    for name, value in zip(leaves, found, strict=True):
        assert_close(value, truth[name], rtol=1e-12, atol=1e-12)


@BOTH
@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
def test_gradcheck(poly, trials, order) -> None:
    call = make_call((3, 2, 2), batch=2, trials=trials, dtype=torch.float64, order=order)
    leaves = call.leaves(poly)
    with _plain_empty():
        assert torch.autograd.gradcheck(
            lambda *values: call.op(poly, **dict(zip(leaves, values, strict=True))),
            list(leaves.values()),
        )


class _plain_empty:
    """gradcheck allocates with torch.empty itself and does not expect NaN."""

    def __enter__(self) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = False

    def __exit__(self, *_: object) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = True


@BOTH
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (0,), (0, 0)])
def test_zero_size(shape, poly, device) -> None:
    x = torch.zeros(2, *shape, device=device, requires_grad=True)
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    coef = torch.ones(3, shape[0], device=device, requires_grad=True)
    y = ops.masked_poly(x, mask, coef) if poly else ops.masked_relu(x, mask)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad.shape == x.shape
    if poly:
        assert torch.equal(coef.grad, torch.zeros_like(coef))


@BOTH
def test_no_batch_and_no_trials(poly, device) -> None:
    for call in (
        make_call((3, 4), batch=0, device=device),
        make_call((3, 4), batch=0, trials="shared", device=device),
    ):
        assert call.op(poly).shape == call.truth(poly).shape
    mask = torch.ones(0, 5, dtype=torch.bool, device=device)
    assert ops.masked_relu(torch.zeros(2, 5, device=device), mask).shape == (0, 2, 5)


def test_larger_than_a_tile(device) -> None:
    """Several tiles, chunks of the batch and threads, in both orders and mask orders."""
    for site, batch in (((64, 32, 32), 19), ((5000,), 3), ((3, 45, 31), 33)):
        for order in ("contiguous", "channels_last"):
            for mask_order in ("contiguous", "channels_last"):
                call = make_call(
                    site, batch=batch, order=order, mask_order=mask_order, device=device
                )
                for poly in (False, True):
                    assert equal(call.op(poly), call.truth(poly))
                    check_backward(call, poly)


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    call = make_call((16, 32, 32), batch=50)
    results = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaves = call.leaves(True)
            call.op(True, **leaves).sum().backward()
            results.append([t.grad for t in leaves.values()])
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_like_torch_relu_at_special_values(device) -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, inf, -inf, 0.0, -0.0, 1.0, -1.0]], device=device, requires_grad=True)
    kept = torch.ones(7, dtype=torch.bool, device=device)
    y, truth = ops.masked_relu(x, kept), torch.relu(x)
    assert equal(y, truth)
    grads = [torch.autograd.grad(t.sum(), x)[0] for t in (y, truth)]
    assert torch.equal(*grads)
    assert equal(ops.masked_relu(x, ~kept), x)
    assert torch.equal(
        torch.autograd.grad(ops.masked_relu(x, ~kept).sum(), x)[0], torch.ones_like(x)
    )


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_error_is_at_most_twice_eagers(poly, dtype, device) -> None:
    """Against fp32 truth: no worse than eager in the same precision, forward and backward."""
    call = make_call((16, 8, 8), batch=8, dtype=dtype, device=device)
    fp32 = call._replace(x=call.x.float(), residual=call.residual.float())
    eager = call._replace(
        coef=call.coef.to(dtype), scale=call.scale.to(dtype), shift=call.shift.to(dtype)
    )

    def run(c: Call, function) -> list[torch.Tensor]:
        leaves = c.leaves(poly)
        y = function(c._replace(**leaves))
        (y.float() ** 2).sum().backward()
        return [y, leaves["x"].grad, leaves["residual"].grad]

    truth = run(fp32, lambda c: c.truth(poly))
    ours = run(call, lambda c: c.op(poly))
    plain = run(eager, lambda c: eager_formula(c, poly))
    for a, b, t in zip(ours, plain, truth, strict=True):
        ours_off, plain_off = (a.float() - t).abs().max(), (b.float() - t).abs().max()
        assert ours_off <= 2 * plain_off


def eager_formula(c: Call, poly: bool) -> torch.Tensor:
    """What a user would write, all in the tensors' own precision."""
    z = c.x * c.scale[:, None, None] + c.shift[:, None, None] + c.residual
    c0, c1, c2 = c.coef[:, :, None, None]
    return torch.where(c.mask, torch.relu(z), (c2 * z + c1) * z + c0 if poly else z)


@BOTH
def test_out_and_in_place(poly, device) -> None:
    for trials in ("single", "stacked"):
        for order in ("contiguous", "channels_last", "sliced"):
            call = make_call((5, 4, 3), trials=trials, order=order, device=device)
            truth = call.truth(poly)
            function = ops.masked_poly if poly else ops.masked_relu
            small = {"scale": call.scale, "shift": call.shift, "trials": call.trials}
            arguments = (call.coef,) if poly else ()
            out = torch.full_like(call.x, float("nan"))
            result = function(
                call.x, call.mask, *arguments, residual=call.residual, out=out, **small
            )
            assert result is out
            assert equal(out, truth)
            other = torch.full(call.x.shape, float("nan"), device=device)  # another memory order
            function(call.x, call.mask, *arguments, residual=call.residual, out=other, **small)
            assert equal(other, truth)
            for target in ("x", "residual"):
                fresh = {"x": call.x.clone(), "residual": call.residual.clone()}
                x, residual = fresh["x"], fresh["residual"]
                function(x, call.mask, *arguments, residual=residual, out=fresh[target], **small)
                assert equal(fresh[target], truth)


def test_layer_coefficients(device) -> None:
    call = make_call((4, 3), device=device)
    coef = torch.tensor([0.5, -1.0, 2.0], device=device, requires_grad=True)
    y = ops.masked_poly(call.x, call.mask, coef)
    truth = reference.masked_poly(call.x, call.mask, coef.detach()[:, None].repeat(1, 4))
    assert equal(y, truth)
    y.sum().backward()
    assert coef.grad.shape == (3,)


def test_a_shared_x_equals_its_copies(device) -> None:
    call = make_call((4, 3, 3), trials="shared", residual=False, device=device)
    copies = call.x.expand(4, *call.x.shape).clone()
    assert equal(call.op(False), call.op(False, x=copies))


def test_only_what_needs_a_gradient_is_saved() -> None:
    """relu keeps its output, and x only for the gradient of a scale."""
    call = make_call((8, 4, 4))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x = call.x.clone().requires_grad_()
        y = ops.masked_relu(x, call.mask, scale=call.scale, shift=call.shift)
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


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"mask": M[:1]}, ValueError, r"mask has shape \(1, 4\).*x \(2, 3, 4\)"),
        ({"mask": M.float()}, TypeError, "mask is torch.float32.*bool"),
        ({"mask": M.to("meta")}, ValueError, "mask is on meta and x on cpu"),
        ({"x": X.long()}, TypeError, "x is torch.int64"),
        ({"scale": torch.ones(3)}, ValueError, "scale was given without shift"),
        ({"shift": torch.ones(3)}, ValueError, "shift was given without scale"),
        ({"scale": torch.ones(3), "shift": torch.ones(2)}, ValueError, r"shift has shape \(2,\)"),
        (
            {"scale": torch.ones(3).long(), "shift": torch.ones(3)},
            TypeError,
            "scale is torch.int64",
        ),
        ({"residual": torch.zeros(2, 3, 5)}, ValueError, r"residual has shape \(2, 3, 5\)"),
        ({"residual": X.double()}, ValueError, "residual is torch.float64"),
        ({"mask": M[None].expand(7, 3, 4), "trials": False}, ValueError, "expected"),
        ({"x": torch.zeros(3, 3, 4)}, ValueError, "two ways.*trials="),
        ({"out": torch.zeros(2, 3, 5)}, ValueError, r"out is \(2, 3, 5\)"),
        ({"x": X.clone().requires_grad_(), "out": X}, RuntimeError, "does not record gradients"),
    ],
)
def test_bad_input(change, error, words) -> None:
    arguments = {"x": X, "mask": M, **change}
    with pytest.raises(error, match=words):
        ops.masked_relu(**arguments)
    with pytest.raises(error, match=words):
        ops.masked_poly(coef=torch.ones(3, 3), **arguments)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 3), (3, 3, 1), ()])
def test_bad_coefficients(shape) -> None:
    x, mask = torch.zeros(2, 5), torch.ones(5, dtype=torch.bool)
    if shape == (3,):
        assert ops.masked_poly(x, mask, torch.ones(shape)).shape == x.shape
        return
    with pytest.raises(ValueError, match="coef has shape"):
        ops.masked_poly(x, mask, torch.ones(shape))


def test_images_are_read_as_images() -> None:
    """[128, 128, 16, 16] is a batch of images, whatever B equals; trials=True says otherwise."""
    x, mask = torch.randn(4, 4, 2, 3), torch.rand(4, 2, 3) > 0.5
    assert torch.equal(ops.masked_relu(x, mask), torch.where(mask, F.relu(x), x))
    stacked = torch.where(mask[:, None], F.relu(x), x)
    assert torch.equal(ops.masked_relu(x, mask, trials=True), stacked)


def test_channels_last_helper() -> None:
    t = torch.randn(2, 3, 4, 5)
    assert channels_last(t, 3).is_contiguous(memory_format=torch.channels_last)
