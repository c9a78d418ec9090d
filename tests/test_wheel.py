"""A release: the sdist has all sources, and its wheel works in a fresh environment beside torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_workflows_run_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for line in path.read_text().splitlines():
            if "run: make " in line:
                assert f"\n{line.split('make ')[1].split()[0]}: " in makefile, line


def test_the_version_is_that_of_the_citation_and_the_changelog() -> None:
    version = (ROOT / "fastbcd/runtime/version.py").read_text().split('"')[-2]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_wheel_of_the_sdist_works(tmp_path) -> None:
    pytest.importorskip("build")
    kept = shutil.ignore_patterns(".git", ".venv", "build", "*.so", "build.json")
    shutil.copytree(ROOT, tmp_path / "source", ignore=kept)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "source"], tmp_path)
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "-cp310-abi3-" in wheel.name
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {*(ROOT / "kernels/cpu").glob("*.cpp"), *(ROOT / "kernels/cpu").glob("*.h")}
    assert {str(path.relative_to(ROOT)) for path in sources} <= names
    with zipfile.ZipFile(wheel) as archive:
        report = json.loads(archive.read("fastbcd/kernels/cpu/build.json"))
    assert report == {"built": True, "reason": None}

    run([sys.executable, "-m", "venv", "--without-pip", "fresh"], tmp_path)
    (site,) = (tmp_path / "fresh/lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for folder in sys.path:  # torch and the other packages of this environment
        if folder.endswith("site-packages"):
            with (site / "beside.pth").open("a") as paths:
                paths.write(f"{folder}\n")
    code = "import fastbcd; print(fastbcd.__file__, fastbcd.backends()[0].reason)"
    where = run([tmp_path / "fresh/bin/python", "-c", code], tmp_path)
    assert where.startswith(str(site))
    assert "C++" in where


def run(command: list, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1_200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
