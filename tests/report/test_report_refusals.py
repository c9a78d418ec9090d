"""What a report is refused for, and the command."""

from __future__ import annotations

import builtins
import re
import shutil
from typing import Any

import pytest

import fastbcd
from fastbcd import report
from fastbcd.cli import main as cli


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runs": []}, "at least one run"),
        ({"runs": ["nowhere"]}, "there is nothing at nowhere"),
        ({"bandwidth": 0}, "bandwidth=0"),
        ({"protocol": "cripten"}, "there is no protocol 'cripten'"),
    ],
)
def test_bad_options(finished, tmp_path, options, message) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        report.write(**{"runs": [finished], "out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


def test_where_nothing_can_be_written(finished, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(OSError, match=re.escape(str(place))):
            report.write([finished], place)
    assert cli.main(["report", str(finished), "--out", "/proc/report"]) == 2
    assert "/proc/report" in capsys.readouterr().err


def test_without_matplotlib(finished, tmp_path, monkeypatch, capsys) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.main(["report", str(finished), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'fastbcd[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------- the command


def test_the_command(finished, tmp_path, capsys) -> None:
    shutil.copytree(finished, tmp_path / "run")
    line = ["report", str(tmp_path / "run"), "--rtt", "40ms", "--protocol", "delphi-gc"]
    assert cli.main(line) == 0
    page = tmp_path / "run" / "report" / "report.html"
    assert f"{page}: open it in a browser; its 3 figures" in capsys.readouterr().out
    assert "<td>delphi-gc, 1.00 Gbit/s, round trip 40.0 ms</td>" in page.read_text(encoding="utf-8")
    assert fastbcd.load_run(tmp_path / "run").done, "the report is no part of the run"
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastbcd report: there is nothing at")
    assert error.count("\n") == 1
