"""The Triton kernels executed on a CUDA device equal the reference, to the bit."""

from __future__ import annotations

import pytest
import torch

from fastbcd.kernels.geometry import geometry, new_output
from fastbcd.ops import reference
from helpers.op_cases import (
    MASKED,
    Case,
    arguments,
    compare,
    compare_out,
    grid,
    groups,
    odd_cases,
    results,
)

pytest.importorskip("triton.language", reason="triton is not installed")
kernels = pytest.importorskip("fastbcd.kernels.triton")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GROUPS = groups(("float32", "float16", "bfloat16"))
ODD = list(odd_cases())
CHUNKS = {"one item per program": (10**9, 1), "two items per program": (1, 2)}


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(("op", "dtype", "trials"), GROUPS, ids=["-".join(g) for g in GROUPS])
def test_kernels_equal_the_reference(monkeypatch, nan_empty, op, dtype, trials, chunks) -> None:
    monkeypatch.setattr(kernels.common, "ELEMENTWISE", CHUNKS[chunks])
    monkeypatch.setattr(kernels.common, "REDUCING", CHUNKS[chunks])
    odd = [c for c in ODD if (c.op, c.dtype, c.trials) == (op, dtype, trials)]
    for case in grid(op, dtype, trials) + odd:
        assert not compare(case, "cuda"), case
        if op in MASKED:
            assert not compare_out(case, "cuda"), case


@pytest.mark.parametrize("op", dict.fromkeys(op for op, _, _ in GROUPS))
def test_sums_are_the_same_every_time(op) -> None:
    case = Case(op, "float16", affine=op in MASKED, residual=True, sizes=(1, 64, 64, 32, 32))
    given = arguments(case, "cuda")
    once, again = results(case, given), results(case, given)
    for name, value in once.items():
        torch.testing.assert_close(value, again[name], rtol=0, atol=0, equal_nan=True)


def huge_forward(sizes: tuple[int, ...], device: str) -> None:
    """y [T, B, *S] with shared x, compared in the first, the middle and the last trial."""
    trials, batch, *site = sizes
    x = torch.randn(batch, *site, device=device, dtype=torch.float16)
    mask = torch.rand(trials, *site, device=device) < 0.5
    y = new_output(x, mask, True)
    kernels.masked_forward(y, x, mask, None, None, None, None, geometry(x, mask, True, True))
    for t in (0, trials // 2, trials - 1):
        assert torch.equal(y[t], reference.masked(x, mask[t]))


def huge_in_place(sizes: tuple[int, ...], device: str) -> None:
    """x [T, B, *S] in place: the last trial keeps its ReLUs, the others have none."""
    trials, batch, *site = sizes
    x = torch.full((trials, batch, *site), -1.0, device=device, dtype=torch.float16)
    mask = torch.zeros(trials, *site, device=device, dtype=torch.bool)
    mask[-1] = True
    kernels.masked_forward(x, x, mask, None, None, None, None, geometry(x, mask, True))
    assert all((x[t] == -1).all() for t in range(trials - 1))
    assert (x[-1] == 0).all()


@pytest.mark.parametrize("check", [huge_forward, huge_in_place])
def test_past_2_to_the_31_elements(check) -> None:
    sizes = (33, 64, 64, 128, 128)  # 2.2 * 10**9 elements of fp16
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free device memory")
    check(sizes, "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_tensors_device_need_not_be_the_current_one() -> None:
    with torch.cuda.device(0):
        assert not compare(Case("masked_relu"), "cuda:1")
