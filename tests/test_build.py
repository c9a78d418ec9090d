"""setup.py builds the C++ kernels, with ninja and without, on a small copy of the project."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")

# Run setup.py with the given arguments; "hide" makes ninja impossible to find.
RUN = """
import runpy, shutil, sys
hide, sys.argv = sys.argv[1] == "hide", ["setup.py", *sys.argv[2:]]
if hide:
    which = shutil.which
    shutil.which = lambda name, **where: None if name == "ninja" else which(name, **where)
runpy.run_path("setup.py", run_name="__main__")
assert "torch" not in sys.modules, "the build imported torch"
"""
SOURCES = {
    "one.cpp": '#include "shared.h"\nextern "C" int one() { return VALUE; }\n',
    "two.cpp": 'extern "C" int two() { return 2; }\n',
    "shared.h": "#define VALUE 1\n",
}


@pytest.fixture
def project(tmp_path) -> Path:
    """The project's own build files around two tiny sources."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("fastbcd/__init__.py", "fastbcd/runtime/__init__.py", "kernels/__init__.py",
                 "kernels/cpu/__init__.py"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / "fastbcd/runtime/version.py", tmp_path / "fastbcd/runtime")
    for name, text in SOURCES.items():
        (tmp_path / "kernels/cpu" / name).write_text(text)
    return tmp_path


def build(project: Path, ninja: str) -> dict:
    """What build.json says after `setup.py build_ext --inplace`."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, ninja, "build_ext", "--inplace"],
        cwd=project, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((project / "kernels/cpu/build.json").read_text())


def objects(project: Path) -> dict[str, int]:
    """The time of every object file."""
    return {p.name: p.stat().st_mtime_ns for p in (project / "build").rglob("*.o")}


@pytest.mark.skipif(shutil.which("ninja") is None, reason="no ninja")
def test_ninja_compiles_what_changed(project) -> None:
    assert build(project, "use")["built"]
    assert len(list((project / "kernels/cpu").glob("_kernels*.so"))) == 1
    first = objects(project)
    assert first.keys() == {"one.o", "two.o"}

    assert build(project, "use")["built"]
    assert objects(project) == first

    (project / "kernels/cpu/two.cpp").touch()
    assert build(project, "use")["built"]
    second = objects(project)
    assert {name for name in first if second[name] != first[name]} == {"two.o"}

    (project / "kernels/cpu/shared.h").touch()
    assert build(project, "use")["built"]
    third = objects(project)
    assert {name for name in first if third[name] != second[name]} == {"one.o"}


def test_builds_without_ninja(project) -> None:
    assert build(project, "hide") == {"built": True, "reason": None}
    assert len(list((project / "kernels/cpu").glob("_kernels*.so"))) == 1
    assert not list((project / "build").rglob("build.ninja"))


@pytest.mark.parametrize("ninja", ["use", "hide"])
def test_a_failure_is_recorded_and_does_not_stop_the_install(project, ninja) -> None:
    (project / "kernels/cpu/two.cpp").write_text("this is no C++\n")
    report = build(project, ninja)
    assert not report["built"]
    assert "compiling failed" in report["reason"]
    assert "install a C++20 compiler" in report["reason"]
