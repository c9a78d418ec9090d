"""The Triton kernels executed on a CUDA device give what the reference gives, to the bit."""

from __future__ import annotations

import pytest
import torch

from fastbcd.kernels.geometry import geometry, new_output
from fastbcd.ops import reference
from helpers.triton_cases import (
    GROUPS,
    Case,
    Tensors,
    differences,
    expected,
    grid,
    odd_cases,
    run,
    tensors,
)

pytest.importorskip("triton.language", reason="triton is not installed")
kernels = pytest.importorskip("fastbcd.kernels.triton")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CASES = [*grid(), *odd_cases()]
CHUNKS = {"one item a program": (10**9, 1), "two items a program": (1, 2)}


def to(t: Tensors, device: str) -> Tensors:
    return Tensors(*(v if v is None else v.to(device) for v in t))


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(
    ("kernel", "dtype", "trials"), GROUPS, ids=["-".join((*k, d, t)) for k, d, t in GROUPS]
)
def test_kernels_equal_the_reference(monkeypatch, nan_empty, kernel, dtype, trials, chunks):
    monkeypatch.setattr(kernels.common, "ELEMENTWISE", CHUNKS[chunks])
    monkeypatch.setattr(kernels.common, "REDUCING", CHUNKS[chunks])
    key = (*kernel, dtype, trials)
    for case in (c for c in CASES if (c.op, c.direction, c.dtype, c.trials) == key):
        t = tensors(case)
        found = run(case, to(t, "cuda"), kernels)
        assert not differences(found, expected(case, t)), case


@pytest.mark.parametrize("op", ["relu", "poly", "soft", "indicator", "saliency", "saliency_poly"])
def test_sums_are_the_same_every_time(op):
    affine = op in ("relu", "poly")
    case = Case(op, "backward", "float16", affine, sizes=(1, 64, 64, 32, 32))
    t = to(tensors(case), "cuda")
    once, again = run(case, t, kernels), run(case, t, kernels)
    for name, value in once.items():
        torch.testing.assert_close(value, again[name], rtol=0, atol=0, equal_nan=True)


def huge_forward(sizes: tuple[int, ...], device: str) -> None:
    """y [T, B, *S] with shared x, looked at in the first, the middle and the last trial."""
    trials, batch, *site = sizes
    x = torch.randn(batch, *site, device=device, dtype=torch.float16)
    mask = torch.rand(trials, *site, device=device) < 0.5
    y = new_output(x, mask, True)
    kernels.relu_forward(y, x, mask, None, None, None, geometry(x, mask, None, True))
    for t in (0, trials // 2, trials - 1):
        assert torch.equal(y[t], reference.masked_relu(x, mask[t]))


def huge_in_place(sizes: tuple[int, ...], device: str) -> None:
    """x [T, B, *S] in place: the last trial keeps its ReLUs, the others have none."""
    trials, batch, *site = sizes
    x = torch.full((trials, batch, *site), -1.0, device=device, dtype=torch.float16)
    mask = torch.zeros(trials, *site, device=device, dtype=torch.bool)
    mask[-1] = True
    kernels.relu_forward(x, x, mask, None, None, None, geometry(x, mask, None, True))
    assert all((x[t] == -1).all() for t in range(trials - 1))
    assert (x[-1] == 0).all()


@pytest.mark.parametrize("check", [huge_forward, huge_in_place])
def test_past_2_to_the_31_elements(check):
    sizes = (33, 64, 64, 128, 128)  # 2.2 * 10**9 elements of fp16
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free device memory")
    check(sizes, "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_tensors_device_need_not_be_the_current_one():
    case = Case("relu", "forward")
    t = tensors(case)
    with torch.cuda.device(0):
        found = run(case, to(t, "cuda:1"), kernels)
    assert not differences(found, expected(case, t))
