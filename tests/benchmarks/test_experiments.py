"""Experiments run from end to end on tiny nets: comparisons of methods, and of several budgets."""

from __future__ import annotations

import json
import sys

import curve
import methods
import pytest
import torch
from safetensors.torch import load_file

import fastbcd

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:after . epochs:RuntimeWarning"),  # masks of few epochs
]


def run(module, monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, "--quick", *map(str, arguments)])
    module.main()


def test_tuned_rows_have_the_masks_of_their_method(tmp_path, monkeypatch, capsys) -> None:
    """SNL with lines, and AutoReP's masks with the training of linearize."""
    rows = ["SNL", "SNL lines", "AutoReP", "AutoReP tuned"]
    line = ["--budgets", 1_200, "--out", tmp_path, "--rows", *rows]
    run(methods, monkeypatch, *line)
    records = [json.loads(text) for text in (tmp_path / "methods.jsonl").read_text().splitlines()]
    assert [record["row"] for record in records] == rows
    assert {(record["epochs"], record["relus"]) for record in records} == {(10, 1_200)}
    folders = [tmp_path / f"{row.replace(' ', '-')}-1200-0" for row in rows]
    masks = [fastbcd.MaskSet.load(folder / "masks.safetensors").bits for folder in folders]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
    rows_of_coef = []
    for folder in folders:
        weights = load_file(folder / "net.safetensors")
        rows_of_coef.append({len(t) for name, t in weights.items() if name.endswith(".coef")})
    assert rows_of_coef == [set(), {2}, {3}, {3}]
    capsys.readouterr()
    run(methods, monkeypatch, *line, "--report")
    assert "not run" not in capsys.readouterr().out


def test_several_budgets_and_runs_of_their_own(tmp_path, monkeypatch, capsys) -> None:
    run(curve, monkeypatch, "--out", tmp_path)
    lines = [text.split() for text in capsys.readouterr().out.splitlines()]
    epochs = {words[0]: words[words.index("epochs") - 1] for words in lines if "epochs" in words}
    assert epochs == {"separate": "8", "one": "4"}
    for folder in ("separate-0", "one-way-0"):
        counts = {fastbcd.load_run(path).count for path in (tmp_path / folder).iterdir()}
        assert counts == set(curve.BUDGETS["small"])
