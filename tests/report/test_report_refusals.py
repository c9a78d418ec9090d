"""What a report is refused for, and the command."""

from __future__ import annotations

import builtins
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastbcd import report
from fastbcd.cli import main as cli
from fastbcd.runs.stages import read


def test_what_is_no_run(finished, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text("{")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"format": "theirs 2"}')
    cases: list[tuple[Path, type[Exception], str]] = [
        (tmp_path / "none", FileNotFoundError, "there is nothing at"),
        (finished / "config.json", NotADirectoryError, "is a file; name the run directory"),
        (tmp_path / "empty", ValueError, "holds no run that has begun"),
        (tmp_path / "text", ValueError, "not readable as JSON"),
        (tmp_path / "other", ValueError, "'theirs 2'; expected one of"),
    ]
    for path, kind, message in cases:
        with pytest.raises(kind, match=re.escape(message)):
            report.write([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_states_are_refused(finished, tmp_path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    state = tmp_path / "run" / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged.*state\.previous\.safetensors, is intact"):
        report.write([tmp_path / "run"], tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": 0.0}, "baseline=0.0"),
        ({"baseline": float("nan")}, "baseline=nan"),
        ({"arch": "resnet81"}, "arch='resnet81'; choose from resnet18"),
        ({"data": "mnist"}, "data='mnist'; choose from fashion"),
        ({"network": report.Network(bandwidth=0)}, "bandwidth=0"),
        ({"network": report.Network(protocol="cripten")}, "there is no protocol 'cripten'"),
    ],
)
def test_bad_options(finished, tmp_path, options, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        report.write([finished], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="at least one run"):
        report.write([], tmp_path / "out")


def test_where_nothing_can_be_written(finished, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file; name a folder"):
        report.write([finished], tmp_path / "file")
    with pytest.raises(OSError, match="cannot write into"):
        report.write([finished], tmp_path / "file" / "under")
    assert cli.main(["report", str(finished), "--out", "/proc/report"]) == 2
    assert "cannot write into /proc/report" in capsys.readouterr().err


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


def test_the_command(stages, tmp_path, capsys) -> None:
    shutil.copytree(stages, tmp_path / "run")
    line = ["report", str(tmp_path / "run"), "--rtt", "40ms", "--protocol", "delphi-gc"]
    assert cli.main(line) == 0
    page = tmp_path / "run" / "report" / "report.html"
    assert f"{page}: open it in a browser; its 9 figures" in capsys.readouterr().out
    assert "delphi-gc, 1.00 Gbit/s, round trip 40.0 ms" in page.read_text(encoding="utf-8")
    assert read(tmp_path / "run").bcd.done, "the report is no stage"
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastbcd report: there is nothing at")
    assert error.count("\n") == 1
