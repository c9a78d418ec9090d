"""The kernel of collapsed: interpreted against its reference, and compiled ahead of time."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.language", reason="triton is not installed")
kernels = pytest.importorskip("fastbcd.kernels.triton")

import triton  # noqa: E402
from test_compiled import TARGETS, Offline, resource_usage  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from fastbcd.kernels import INTERPRETED  # noqa: E402

INTERPRET = """
import torch
from fastbcd import kernels
from fastbcd.scoring.kinks import kinks, kinks_reference
assert kernels.choose(torch.zeros(1)) is kernels.TRITON.module
torch.manual_seed(0)
for n, trials, batch in [(1, 1, 1), (17, 2, 3), (5, 3, 130), (3, 1, 256)]:
    for fresh in (False, True):
        table = torch.randn(n + 7, trials, batch)
        a = torch.randn(n + 2, batch)[1 : n + 1]
        if not fresh:
            table[3, 0, 0] = float("nan")
        mask = torch.randint(2, (n + 3, trials), dtype=torch.uint8)[2 : n + 2]
        found, truth = table.clone(), table.clone()
        kinks(found[3 : n + 3], a, mask, fresh=fresh)
        kinks_reference(truth[3 : n + 3], a, mask, fresh)
        assert torch.equal(found.nan_to_num(7.0), truth.nan_to_num(7.0)), (n, trials, batch, fresh)
print("equal")
"""


def test_interpreted_it_equals_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRET], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1: nothing is compiled")
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_compiled_it_neither_spills_nor_shares(name, fresh) -> None:
    target, compiled = TARGETS[name], []

    def compile_only(self: JITFunction, grid: tuple[int, ...]):
        return lambda *args, **options: compiled.append(
            self.run(*args, grid=grid, warmup=True, **options)
        )

    with (
        mock.patch.object(triton.runtime.driver, "_active", Offline(target)),
        mock.patch.object(JITFunction, "__getitem__", compile_only),
    ):
        mask = torch.zeros(33, 2, dtype=torch.uint8)
        kernels.kinks(torch.zeros(33, 2, 3), torch.zeros(33, 3), mask, fresh)
    (kernel,) = compiled
    assert kernel.metadata.shared == 0
    if target.backend == "cuda":
        resources = resource_usage(kernel.asm["cubin"])
        assert resources["STACK"] == resources["LOCAL"] == 0
        assert resources["REG"] <= 40
