"""The Triton kernels, compiled by Triton and run natively on this CPU, equal the reference.

Alone through the ops, at tiny and at real sizes, and behind the fake CUDA device in whole runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import fastbcd
from fastbcd import kernels
from fastbcd.ops import selfcheck
from helpers import fake_cuda
from helpers.op_cases import (
    MASKED,
    TRIALS,
    UNSTACKED,
    Case,
    compare,
    compare_kink,
    grid,
    groups,
    odd_cases,
)

pytest.importorskip("triton.language", reason="triton is not installed")
pytestmark = pytest.mark.skipif(kernels.INTERPRETED, reason="nothing is compiled")
native_triton = pytest.importorskip("helpers.native_triton")


@pytest.fixture
def native() -> Iterator[Any]:
    """The ops run the native kernels."""
    with (
        native_triton.on_cpu() as module,
        mock.patch.object(kernels, "module_for", return_value=module),
    ):
        yield module


@pytest.mark.parametrize("op", [*MASKED, *UNSTACKED])
def test_kernels_equal_the_reference(native, op) -> None:
    full = Case(op, affine=op in MASKED, residual=True, special=True, sizes=(2, 3, 24, 5, 3))
    last = full._replace(order="channels_last")
    cases = [last]
    if op in MASKED:
        # More trials than bits in a word, and rounding to bfloat16.
        cases = [full._replace(trials="both shared", sizes=(33, 1, 4, 2, 3)),
                 full._replace(dtype="bfloat16", mask_order="channels_last")]  # fmt: skip
    for case in cases:
        assert not compare(case), case


GROUPS = groups(("float32", "float16", "bfloat16"))


@pytest.mark.long
@pytest.mark.parametrize(("op", "dtype", "trials"), GROUPS, ids=["-".join(g) for g in GROUPS])
def test_every_case_equals_the_reference(native, nan_empty, op, dtype, trials) -> None:
    odd = [c for c in odd_cases() if (c.op, c.dtype, c.trials) == (op, dtype, trials)]
    for case in grid(op, dtype, trials) + odd:
        assert not compare(case), case


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("site", [(64, 32, 32), (512, 4, 4), (100, 14, 14)], ids=str)
@pytest.mark.parametrize("op", [*MASKED, *UNSTACKED])
def test_real_sizes(native, op, site, dtype) -> None:
    for order in ("contiguous", "channels_last"):
        trials = TRIALS if op in MASKED else ("none",)
        for which in trials[::2]:
            case = Case(op, dtype, which, order, "contiguous", op in MASKED, True, (4, 25, *site))
            assert not compare(case), case


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(1, 1, 1), (17, 2, 3), (5, 3, 130), (3, 1, 256)])
def test_the_kink(native, sizes) -> None:
    for fresh in (False, True):
        assert not compare_kink("cpu", fresh, sizes)


FAULTS = {
    "a wrong stride": ("row", "* n", "* (n - 1)", "line"),
    "a wrong mask offset": ("mask_offsets", "* inner +", "* inner + 1 +", "relu"),
    "a wrong sum": ("masked_backward_kernel", "dc1 += g * p", "dc1 += g", "line"),
    "a span of rows that stops early": (
        "masked_backward_kernel", "min(top + span, rows)", "min(top + 1, rows)", "poly",
    ),
    "a program too few": ("masked_forward_kernel", "first + chunk", "first + chunk - 1", "relu"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(native, nan_empty, fault) -> None:
    function, old, new, op = FAULTS[fault]
    case = Case(f"masked_{op}", order="channels_last", residual=True, sizes=(1, 3, 24, 5, 3))
    with native_triton.changed(getattr(native.masked, function), old, new):
        assert compare(case)


def run_on(device: str, call: Any) -> fastbcd.Run:
    x = torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = fastbcd.ImageData.from_arrays(x, torch.arange(24) % 3)
    torch.manual_seed(0)
    net = fastbcd.models.resnet20(num_classes=3, image_size=8)
    return call(net.to(device), data.to(device))


def bcd(net, data) -> fastbcd.Run:
    finetune = fastbcd.Finetune(epochs=1, batch_size=12, amp=False, padding=1)
    return fastbcd.bcd(net, data, 9_000, drc=2_000, rt=2, finetune=finetune, proposal="saliency")


def linearize(net, data) -> fastbcd.Run:
    return fastbcd.linearize(net, data, 6_000, epochs=2)


@pytest.mark.parametrize("call", [bcd, pytest.param(linearize, marks=pytest.mark.long)])
def test_a_whole_run_executes_the_triton_kernels(call, monkeypatch) -> None:
    """On the fake CUDA device; it removes as many ReLUs as on the CPU, and learns finite weights.

    Each kernel is compared with the reference at its first use: that, scoring and training compile
    less than a third of the 173 kernels that it once took.
    """
    native_triton.cache.clear()
    native_triton.compiled.clear()
    monkeypatch.setattr(selfcheck, "_verdicts", {})
    with fake_cuda.device(native=True) as gpu:
        kernels.TRITON.module.TRUSTED = False
        there = run_on("cuda", call)
        assert gpu.counts["launch"] > 1000
        masks = there.masks.bits.cpu()
        assert all(p.isfinite().all() for p in there.model.cpu().parameters())
    assert selfcheck._verdicts
    assert all(selfcheck._verdicts.values())
    assert 10 < sum(native_triton.compiled.values()) <= 173 / 3
    here = run_on("cpu", call)
    assert masks.sum() == here.masks.bits.sum()
    # The first step is decided before any weight was trained.
    assert there.history[0].chosen == here.history[0].chosen
