"""Strides of every argument, overlapping memory of out=, and the checks of the C++ kernels."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fastbcd import kernels, ops
from fastbcd.ops import reference
from helpers.op_cases import (
    DIFFERENTIABLE,
    MASKED,
    SALIENCY,
    Case,
    arguments,
    disagreement,
    equal,
    ordered,
    results,
    rows,
)

SMALL = ("scale", "shift", "coef", "alpha", "aux", "weight", "bias")  # per channel or per unit
OTHERS = ("x", "residual", "grad", "mask")
SIZES = (2, 3, 5, 4, 6)


def expanded(t: Tensor) -> Tensor:
    """One value for all."""
    return t[(slice(1),) * t.ndim].expand(t.shape)


def transposed(t: Tensor) -> Tensor:
    """Dimensions in the opposite order of memory."""
    return t.permute(*reversed(range(t.ndim))).contiguous().permute(*reversed(range(t.ndim)))


def strided(t: Tensor) -> Tensor:
    """Every other element of something larger, whose other elements are NaN."""
    big = torch.stack([t, torch.full_like(t, float("nan")) if t.is_floating_point() else ~t], -1)
    return big[..., 0]


def last_row(t: Tensor) -> Tensor:
    """At the end of its memory: a read beyond it leaves the allocation."""
    return torch.cat([torch.zeros_like(t)[None], t[None]])[1]


CHANGES = (expanded, transposed, strided, last_row)


@pytest.mark.usefixtures("nan_empty")
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("op", [*DIFFERENTIABLE, *SALIENCY])
def test_any_strides_of_any_argument(op, change, device) -> None:
    for order, names in product(("contiguous", "channels_last"), (SMALL, OTHERS, SMALL + OTHERS)):
        for trials in ("none", "stacked", "both shared") if op in MASKED else ("none",):
            case = Case(op, "float32", trials, order, affine=op in MASKED, residual=True,
                        sizes=SIZES)  # fmt: skip
            given = arguments(case, device)
            changed = {n: change(t) if n in names and t is not None else t
                       for n, t in given.items()}  # fmt: skip
            plain = {n: None if t is None else t.contiguous() for n, t in changed.items()}
            found = results(case, changed)
            assert not disagreement(case, plain, found), (case, names)


def test_one_scale_for_all_channels() -> None:
    """An expanded scale has one element in memory."""
    x, mask = torch.randn(3, 8, 5), torch.rand(8, 5) > 0.5
    two, one = torch.tensor([2.0]).expand(8), torch.tensor([1.0]).expand(8)
    z = 2 * x + 1
    assert torch.equal(
        ops.masked_relu(x, mask, scale=two, shift=one), torch.where(mask, z.relu(), z)
    )


# ------------------------------------------------------------------- what C++ refuses to read


def recorded(case: Case, monkeypatch) -> list[tuple[Any, list[Any]]]:
    """The kernel calls of a case: (kernel, arguments)."""
    calls = []

    class Recorder:
        TRUSTED = True

        def __getattr__(self, name: str) -> Any:
            if name.endswith("_plain"):  # these leave what they do not expect to the checks
                raise AttributeError(name)
            kernel = getattr(kernels.CPU.module, name)

            def record(*given: Any) -> None:
                calls.append((kernel, list(given)))
                kernel(*given)

            return record

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "module_for", lambda x: Recorder())
        results(case, arguments(case))
    return calls


@pytest.mark.skipif(kernels.INTERPRETED, reason="the C++ kernels are not in use")
@pytest.mark.parametrize("op", [*DIFFERENTIABLE, *SALIENCY])
@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
def test_kernels_refuse_what_they_do_not_expect(op, order, monkeypatch) -> None:
    """Other strides, another dtype, other sizes, of every tensor of every kernel."""
    trials = "stacked" if op in MASKED else "none"
    case = Case(op, "float32", trials, order, affine=op in MASKED, residual=True, sizes=SIZES)
    tried = 0
    for kernel, given in recorded(case, monkeypatch):
        for i, t in enumerate(given):
            if not isinstance(t, Tensor):
                continue
            other = t.double() if t.is_floating_point() else t.int()
            bad = [expanded(t), ordered(t, t.ndim, "sliced"), other, t[..., :-1].contiguous()]
            if t.ndim >= 3:  # the other memory order, a transposed batch
                bad += [transposed(t), t.transpose(-1, -2).contiguous().transpose(-1, -2)]
            for wrong in bad:
                with pytest.raises(RuntimeError, match=r"dtype|elements|memory|single memory"):
                    kernel(*given[:i], wrong, *given[i + 1 :])
                tried += 1
        with pytest.raises(RuntimeError, match="geometry"):
            kernel(*given[:-1], list(given[-1])[:-1])
        with pytest.raises(RuntimeError, match=r"geometry|elements"):
            kernel(*given[:-1], [given[-1][0], 0, *given[-1][2:]])
        with pytest.raises(RuntimeError, match="elements"):
            kernel(*given[:-1], [given[-1][0], given[-1][1] + 1, *given[-1][2:]])
    assert tried > 20


@pytest.mark.skipif(kernels.INTERPRETED, reason="the C++ kernels are not in use")
def test_kink_refuses_what_it_does_not_expect() -> None:
    kernel = kernels.CPU.module.kink
    c, a, mask = torch.zeros(4, 3, 5), torch.zeros(4, 5), torch.ones(4, 3, dtype=torch.uint8)
    kernel(c, a, mask, True)
    for bad in (
        (strided(c), a, mask), (c, strided(a), mask), (c, a, expanded(mask)), (c.double(), a, mask),
        (c, a[:-1], mask), (c, a, mask.bool()), (c.half(), a.half(), mask), (c[0], a, mask),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"dtype|elements|memory|float32|dimensions"):
            kernel(*bad, False)


# ----------------------------------------------------------- what C++ takes without more checks


def plain_arguments(op: str, order: str, dtype: str = "float32") -> dict[str, Any]:
    case = Case(op, dtype, order=order, affine=True, residual=True, sizes=SIZES)
    given = arguments(case)
    return {n: given[n] for n in ("x", "mask", "coef", "scale", "shift", "residual")}


def plain_backward(grad: Tensor, y: Tensor, mask: Tensor) -> Tensor | None:
    """dx of a ReLU without scale from its output."""
    backward, nothing = kernels.CPU.module.masked_backward_plain, [None] * 4
    return backward(grad, y, None, mask, *nothing, False, False)[0]


def transposed_images(t: Tensor) -> Tensor:
    """[.., C, H, W] dense as (C, W, H)."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.skipif(kernels.INTERPRETED, reason="the C++ kernels are not in use")
@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
@pytest.mark.parametrize("op", MASKED)
def test_a_plain_call_is_one_kernel(op, order) -> None:
    kernel = kernels.CPU.module.masked_plain
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        given = plain_arguments(op, order, dtype)
        for left_out in ((), ("residual",), ("scale", "shift"), ("scale", "shift", "residual")):
            some = {n: None if n in left_out else t for n, t in given.items()}
            y = kernel(*some.values())
            assert equal(y, reference.masked(**some))
            assert y.stride() == given["x"].stride()


@pytest.mark.parametrize("site", [(3, 31, 33), (70, 30, 31), (1025, 3, 2), (2050, 2, 3)])
@pytest.mark.parametrize("op", MASKED)
def test_channels_last_in_several_pieces(op, site, device) -> None:
    """Pieces of whole rows of channels, a last one that is shorter, several threads."""
    case = Case(op, order="channels_last", affine=True, residual=True, sizes=(1, 5, *site))
    given = arguments(case, device)
    assert not disagreement(case, given, results(case, given))


@pytest.mark.skipif(kernels.INTERPRETED, reason="the C++ kernels are not in use")
@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
@pytest.mark.parametrize("op", MASKED)
def test_a_call_that_is_not_plain_is_left_to_the_checks(op, order) -> None:
    """Other strides, dtypes, sizes, devices, and one of scale and shift alone."""
    kernel = kernels.CPU.module.masked_plain
    given = plain_arguments(op, order)
    assert kernel(*given.values()) is not None
    for name, t in given.items():
        if t is None:
            continue
        bad = [expanded(t), strided(t), t.to("meta"), t.int(), t[..., :-1].contiguous(), t[None]]
        bad += [t.flatten()] if t.ndim > 1 else []
        bad += [t.double()] if t.is_floating_point() else []
        bad += [transposed_images(t)] if t.ndim > 2 else []
        for wrong in bad:
            assert kernel(*{**given, name: wrong}.values()) is None, (name, wrong.shape)
        if op == "masked_relu" and name in ("x", "mask", "residual"):
            three = {n: given[n] for n in ("residual", "x", "mask")}  # grad, y, mask
            assert plain_backward(*three.values()) is not None
            for wrong in bad:
                assert plain_backward(*{**three, name: wrong}.values()) is None, (name, wrong.shape)
    for name in ("scale", "shift"):
        assert kernel(*{**given, name: None}.values()) is None
    assert kernel(*{**given, "x": given["x"][:0], "residual": None}.values()) is None


# ------------------------------------------------------------------------------- overlapping out

B, C, H = 3, 4, 4
N = B * C * H * H


def coefficients(op: str) -> dict[str, Tensor]:
    return {"coef": torch.randn(rows(op), C)} if rows(op) else {}


def check_out(op: str, x, mask, out, **small) -> None:
    """out= gives what the reference gives on copies that were made before."""
    coef = coefficients(op)
    copies = {n: None if t is None else t.clone() for n, t in (small | coef).items()}
    trials = mask.ndim == 4
    want = reference.masked(x.clone(), mask.clone(), trials=trials, **copies)
    getattr(ops, op)(x, mask, out=out, trials=trials, **small, **coef)
    assert equal(out, want)


def images(t: Tensor, at: int) -> Tensor:
    return t[at : at + N].view(B, C, H, H)


@pytest.mark.parametrize("op", MASKED)
@pytest.mark.parametrize("shift", [0, 1, H, C * H * H, N - 1])
def test_out_partly_in_the_memory_of_x_or_residual(op, shift) -> None:
    mask = torch.rand(C, H, H) > 0.5
    for target in ("x", "residual"):
        for sign in (1, -1):
            memory, other = torch.randn(3 * N), torch.randn(B, C, H, H)
            inside, out = images(memory, N), images(memory, N + sign * shift)
            x, residual = (inside, other) if target == "x" else (other, inside)
            check_out(op, x, mask, out, residual=residual)


@pytest.mark.parametrize("op", MASKED)
def test_out_is_another_view_of_an_input(op) -> None:
    mask = torch.rand(C, H, H) > 0.5
    x = torch.randn(B, C, H, H)
    check_out(op, x, mask, x.transpose(2, 3))
    x = torch.randn(B, C, H, H)
    check_out(op, x, mask, x.flip(0).transpose(1, 2))  # a copy of x, then a view
    x = torch.randn(B, C, H, H)
    check_out(op, torch.randn(B, C, H, H), mask, x.transpose(1, 2), residual=x)
    both = torch.randn(B, C, H, 2 * H)  # interleaved, no element in common
    check_out(op, both[..., ::2], mask, both[..., 1::2])
    memory = torch.randn(N + C)
    check_out(op, torch.randn(B, C, H, H), mask, images(memory, 0), scale=memory[:C],
              shift=memory[N - C // 2 : N + C // 2])  # fmt: skip
    memory = torch.randn(N)
    bits = memory.view(torch.uint8)[: C * H * H].view(C, H, H)
    check_out(op, torch.randn(B, C, H, H), bits, images(memory, 0))


@pytest.mark.parametrize("op", MASKED)
def test_a_shared_x_inside_out(op) -> None:
    mask = torch.rand(5, C, H, H) > 0.5
    for trial in (0, 2, 4):
        out = torch.randn(5, B, C, H, H)
        check_out(op, out[trial], mask, out)
        out = torch.randn(5, B, C, H, H)
        check_out(op, torch.randn(5, B, C, H, H), mask, out, residual=out[trial])


@pytest.mark.parametrize("op", MASKED)
def test_an_out_with_shared_elements_is_refused(op) -> None:
    """By torch's own error, which says what to do."""
    x, mask = torch.randn(B, C, H, H), torch.rand(C, H, H) > 0.5
    coef = coefficients(op)
    out = torch.zeros(1, C, H, H).expand(B, C, H, H)
    with pytest.raises(RuntimeError, match=r"single memory location. Please clone\(\)"):
        getattr(ops, op)(x, mask, out=out, **coef)


@pytest.mark.parametrize("op", MASKED)
def test_writing_out_invalidates_an_earlier_graph(op) -> None:
    """A graph that saved the tensor before raises, instead of a wrong gradient."""
    mask = torch.ones(C, H, H, dtype=torch.bool)
    coef = coefficients(op)
    for view in (lambda t: t, lambda t: t.transpose(2, 3)):
        leaf = torch.randn(B, C, H, H, requires_grad=True)
        saved = leaf.exp()
        with torch.no_grad():
            getattr(ops, op)(torch.randn(B, C, H, H), mask, out=view(saved), **coef)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()
