"""Runs to report on, made once per session, and a fast stand-in for drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastbcd import report
from fastbcd.report import writer
from helpers.report_pages import PNG, Page


@pytest.fixture
def drawn() -> None:
    """For a test that needs real figures."""


@pytest.fixture(autouse=True)
def quick(request, monkeypatch) -> None:
    """Figures are made but not drawn, which takes seconds, unless the test uses `drawn`."""

    def stand_in(figure: Any) -> bytes:
        return PNG + repr([(a.get_xlabel(), a.get_ylabel()) for a in figure.axes]).encode()

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(writer, "_png", stand_in)


@pytest.fixture
def page_of(tmp_path):
    """The page on some runs."""

    def make(*runs: Path, **options: Any) -> Page:
        return Page(report.write(runs, tmp_path / "page", **options))

    return make
