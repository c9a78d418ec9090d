"""Runs killed with SIGKILL at any moment end as if they had not been; a full disk loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).parents[1] / "helpers" / "kill_cases.py"


def children(folder: Path, kills: int, seconds: float) -> dict[str, Any]:
    """What happened to the child processes of kill_cases.py."""
    command = [sys.executable, str(CASES), str(folder), str(kills), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_storm(found: dict[str, Any], kills: int) -> None:
    assert "failed" not in found, found["failed"]
    assert found["kills"] >= kills


def test_killed_runs_end_like_others(tmp_path) -> None:
    found = children(tmp_path, 5, 0)
    check_storm(found["storm"], 5)
    # A real limit on the size of files: the state does not fit.
    limit = found["limit"]
    assert "failed" not in limit, limit["failed"]
    assert "step 2 could not be written into the run directory" in limit["error"]
    assert "File too large" in limit["error"]
    assert (limit["before"], limit["after"]) == (1, 5)


@pytest.mark.long
def test_a_storm_of_kills(tmp_path) -> None:
    check_storm(children(tmp_path, 40, 90)["storm"], 40)
