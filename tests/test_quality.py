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
options = ["--collect-only", "--benchmark-disable", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, "benchmarks"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Phrases that must be read twice, beside the plain way to write it.
MANNERED = {
    r"by and by": "over time, as needed",
    r"reach(es)? for": "use",
    r"autograd comes? by": "is called by autograd",
    r"they are themselves|it is itself": "are unchanged",
    r"nothing of something": "0",
    r"is sure to|are sure to": "will, certainly",
    r"(to|by) who\b": "for those who",
    r"\bbut for\b": "except for",
    r"(is|are) said\b(?! to)": "is reported, is warned about",
    r"go(es|ing)? on (with|from|where)\b": "continues, resumes from",
    r"\w among it\b|, [\w' ]+ among them\b": "including",
    r"take(s|n)? notes?\b": "records",
    r"(gives?|given) back": "returns, restores",
    r"says? so\b": "warns, reports it",
    r"\bat hand\b": "available",
    r"\banew\b": "again",
    r"of its own accord": "by itself",
    r"\ba (line|bit|record|number|row|byte|bar) an? (step|epoch|unit|trial|image|site|run)": "per",
    r"\b(once|twice|bytes|bits|lines|epochs?|rounds|forwards|values|elements|batches|\d ReLUs) an? "
    r"(step|neuron|site|image|epoch|run|round|pair|call|layer|channel|element|thread)\b": "per",
}
TEXTS = [
    path
    for pattern in ("*.md", "Makefile", "*.toml", "setup.py", "fastbcd/**/*.py", "kernels/**/*.py",
                    "kernels/**/*.cpp", "kernels/**/*.h", "tests/**/*.py", "benchmarks/**/*.py",
                    "benchmarks/*.md", "docs/*.md", "docs/*.py")
    for path in ROOT.glob(pattern)
    if path != Path(__file__)
]  # fmt: skip


@pytest.mark.parametrize("phrase", MANNERED)
def test_plain_english(phrase) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(phrase, line, re.IGNORECASE)
    ]
    assert found == [], f"write instead: {MANNERED[phrase]}"
