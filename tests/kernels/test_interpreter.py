"""The Triton kernels, interpreted on the CPU through the ops, equal the reference.

The cases run in a process of their own (helpers/interpreter_run.py); each test here reports the
results of one group.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.op_cases import MASKED, SALIENCY

pytest.importorskip("triton.language", reason="triton is not installed")

RUN = Path(__file__).parents[1] / "helpers" / "interpreter_run.py"
GROUPS = (*MASKED, "soft_relu", "indicator_poly", *SALIENCY, "out", "kink")
SCOPE = pytest.mark.parametrize("scope", ["", pytest.param("all", marks=pytest.mark.long)])


@functools.cache
def results(scope: str) -> dict[str, list[str]]:
    """{case: how it differs from the reference}."""
    done = subprocess.run(
        [sys.executable, str(RUN), scope], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@SCOPE
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_equal_the_reference(scope, group) -> None:
    found = {n: v for n, v in results(scope).items() if n.replace(" ", "-").split("-")[0] == group}
    assert len(found) > 3
    wrong = [f"{name}\n    {line}" for name, lines in found.items() for line in lines]
    assert not wrong, f"{len(wrong)} differences in {len(found)} cases:\n" + "\n".join(wrong)
