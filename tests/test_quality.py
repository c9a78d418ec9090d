"""The tree is clean: ruff, mypy, runnable examples, short files."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
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


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]])
def test_clean(command) -> None:
    target = [] if command == ["mypy"] else ["."]
    done = subprocess.run(
        [sys.executable, "-m", *command, *target], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_examples(name) -> None:
    module = importlib.import_module(name)
    names = {"torch": torch, "nn": torch.nn, "fastbcd": fastbcd}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_the_readme_examples_run(capsys) -> None:
    """All blocks of Python, one after the other, on a small network and the embedded images."""
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    data = fastbcd.load("fashion-mnist-mini").first(64)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(676, 10)
    )
    names = {"model": model, "images": next(data.batches(2))[0], "data": data}
    names["train_my_way"] = lambda net: None
    with torch.random.fork_rng():
        for block in blocks:
            exec(block.split("```")[0], names)
    assert "300 of 676 ReLUs kept" in capsys.readouterr().out


def test_public_names_are_documented() -> None:
    for name in fastbcd.__all__:
        assert getattr(fastbcd, name).__doc__, f"{name} has no docstring"


def test_files_stay_short() -> None:
    sources = [p for folder in ("fastbcd", "kernels") for p in (ROOT / folder).rglob("*.py")]
    sources += [*(ROOT / "kernels").rglob("*.cpp"), *(ROOT / "kernels").rglob("*.h")]
    long = {p.name: n for p in sources if (n := len(p.read_text().splitlines())) > 400}
    assert not long, "one file says one thing: split these"
