"""Short runs of everything that decides an outcome end as they did when golden.json was recorded.

A change that means to change an outcome records the file again, and its message says why:

    PYTHONPATH=tests python tests/helpers/golden_runs.py --record
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HELPERS = Path(__file__).parent / "helpers"
EXPECTED = json.loads((HELPERS.parent / "golden.json").read_text())


@pytest.fixture(scope="module")
def actual() -> dict[str, Any]:
    """What the runs give now, in a process of their own with one thread."""
    command = [sys.executable, str(HELPERS / "golden_runs.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", EXPECTED["runs"])
def test_a_run_ends_as_recorded(actual, name) -> None:
    before, now = EXPECTED["runs"][name], actual["runs"][name]
    if actual["machine"] == EXPECTED["machine"]:
        assert now == before
    else:  # another CPU rounds sums differently: other weights, and a step may choose differently
        for run in (before, now):
            run["config"]["settings"].pop("teacher", None)  # a digest of weights
        assert now["config"] == before["config"]
        assert len(now["history"]) == len(before["history"])
        assert [sorted(step) for step in now["history"]] == [
            sorted(step) for step in before["history"]
        ]
        assert sum(now["counts"]) == pytest.approx(sum(before["counts"]), abs=300)


def test_every_run_is_compared(actual) -> None:
    assert actual["runs"].keys() == EXPECTED["runs"].keys()
