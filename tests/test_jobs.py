"""examples/jobs.py: processes that share nothing take the jobs of a list in turn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fastbcd

ROOT = Path(__file__).parent.parent
CODE = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import jobs
jobs.main([(3_000, 0), (2_000, 0), (1_000, 5)], images=60, epochs=1)
"""


def test_two_processes_share_the_jobs(tmp_path) -> None:
    for number in ("0", "1"):
        environment = {**os.environ, "RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": "2"}
        done = subprocess.run(
            [sys.executable, "-c", CODE], cwd=tmp_path, env=environment,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs = sorted(path.name for path in (tmp_path / "runs" / "jobs").iterdir())
        assert runs == [["1000-5", "3000-0"], ["1000-5", "2000-0", "3000-0"]][int(number)]
    run = fastbcd.load_run(tmp_path / "runs" / "jobs" / "1000-5")
    assert (run.count, run.done, run.settings["seed"]) == (1_000, True, 5)
