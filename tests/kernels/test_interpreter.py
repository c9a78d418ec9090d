"""The Triton kernels, interpreted on the CPU, give what the reference gives.

The cases run in one process of their own (interpreter_run.py), since TRITON_INTERPRET=1 has to
be set before triton is imported; each test here reports on a group of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.triton_cases import GROUPS, grid, odd_cases, op_cases, soft_op_cases

pytest.importorskip("triton.language", reason="triton is not installed")

RUN = Path(__file__).parents[1] / "helpers" / "interpreter_run.py"
CASES = [*grid(), *odd_cases()]


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    """{case: how it differs from the reference}."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(RUN)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def report(results: dict[str, list[str]], names: list[str]) -> None:
    """Fail with a line for each case that differs. A case without a result is a KeyError."""
    assert names
    wrong = [f"{name}\n    {line}" for name in names for line in results[name]]
    assert not wrong, f"{len(wrong)} differences in {len(names)} cases:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("kernel", "dtype", "trials"), GROUPS, ids=["-".join((*k, d, t)) for k, d, t in GROUPS]
)
def test_kernels_equal_the_reference(results, kernel, dtype, trials):
    key = (*kernel, dtype, trials)
    report(results, [str(c) for c in CASES if (c.op, c.direction, c.dtype, c.trials) == key])


@pytest.mark.parametrize("op", ["relu", "poly"])
def test_the_public_ops_run_on_them(results, op):
    report(results, [f"op {c}" for c in op_cases() if c.op == op])


@pytest.mark.parametrize("op", ["soft", "indicator", "saliency", "saliency_poly"])
def test_the_soft_ops_run_on_them(results, op):
    report(results, [f"soft op {c}" for c in soft_op_cases() if c.op == op])
