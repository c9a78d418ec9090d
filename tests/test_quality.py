"""The tree is clean: ruff, mypy, runnable examples, plain English."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastbcd

ROOT = Path(__file__).parent.parent
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(fastbcd.__path__, "fastbcd.")
    if not name.endswith("__main__")
]


LINT = re.findall(
    r"^\t\$\(BIN\)/python -m (ruff .*|mypy.*)$", (ROOT / "Makefile").read_text(), re.M
)


@pytest.mark.parametrize("command", LINT)
def test_clean(command) -> None:
    """The lines of `make lint`."""
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_lint_is_all_three() -> None:
    assert [command.split()[:2] for command in LINT] == [
        ["ruff", "check"], ["ruff", "format"], ["mypy"]
    ]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples(name) -> None:
    module = importlib.import_module(name)
    names = {"torch": torch, "nn": torch.nn, "fastbcd": fastbcd}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_benchmarks_and_docs_import() -> None:
    """They use internal names, which mypy and the other tests do not check."""
    folders = [ROOT / "benchmarks", ROOT / "docs"]
    names = [p.stem for f in folders for p in f.glob("*.py") if not p.stem.startswith("test_")]
    code = f"""
import sys, pytest
sys.path[:0] = {[str(folder) for folder in folders]}
import {", ".join(sorted(names))}
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "benchmarks"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
