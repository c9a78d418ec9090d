"""The docs site builds without warnings, and its reference has every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastbcd

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs", reason="no mkdocs: make setup installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_list(site) -> None:
    listed = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")} | {"RESULTS.md"}


def test_the_reference_has_every_name(site) -> None:
    text = (site / "api/index.html").read_text()
    names = set(re.findall(r"<h3 id=[^>]*>(\w+)", text))
    assert set(fastbcd.__all__) - {"models", "private", "ops", "report"} <= names
    assert {"masked_relu", "resnet18", "Target", "write"} <= names
    assert "A new network in which every ReLU has one bit per neuron" in text


def test_nothing_leads_out_of_the_site(site) -> None:
    for page in site.rglob("index.html"):
        for link in re.findall(r'(?:href|src)="([^"#:]+)[#"]', page.read_text()):
            assert (page.parent / link).exists(), (page, link)
