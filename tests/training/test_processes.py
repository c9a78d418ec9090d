"""Training on several ranks equals training on one; a killed run resumes to the same result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "helpers" / "training_cases.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """The results of every case of training_cases.py."""
    command = [sys.executable, str(CASES), str(tmp_path_factory.mktemp("training"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


STARTS = ["snl", "autorep", "deepreduce", "senet", "relupruner"]


@pytest.mark.parametrize(
    "case", ["finetuned", "finetuned_resnet", "finetuned_synced", "mismatch", "dense", *STARTS]
)
def test_two_ranks_train_as_one(found, case) -> None:
    first, second, alone = found[case]
    assert "failed" not in first, first["failed"]
    assert first == second
    for key in ("computed", "kept"):  # no view of the teacher is computed twice
        assert first.get(key) == alone.get(key)
    if case != "finetuned_resnet":  # its batch norm sees other batches on two ranks
        assert first["weights"] == pytest.approx(alone["weights"], rel=1e-3, abs=1e-4)
        for key in {"loss", "counts", "accuracy"} & first.keys():
            assert first[key] == pytest.approx(alone[key], rel=1e-4)


def test_ranks_with_different_arguments_are_refused(found) -> None:
    for budget, data, batch in found["different"]:
        assert "budget is " in budget
        assert "data.digest is" in data
        assert "batch_size=1, 41 images: each of 2 ranks needs one" in batch


def test_a_killed_run_resumes_to_the_same_result(found) -> None:
    assert found["killed"]
    assert found["saved"] == 3 < len(found["straight"]["records"])
    assert found["resumed"] == found["straight"]
    assert found["again"] == found["straight"], "a finished run returns its result"
