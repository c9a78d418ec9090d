"""The rows of the paper's tables: their settings, their plans, and their stages on a small net."""

from __future__ import annotations

import pytest
import torch

import fastbcd
from fastbcd import models
from fastbcd.data.sources import KNOWN
from fastbcd.report import published
from paper import run as paper

ROWS = paper.every_row()
FULL = {
    ("resnet18", 32): 491_520,
    ("resnet18", 64): 1_966_080,
    ("wide_resnet22_8", 32): 1_359_872,
    ("wide_resnet22_8", 64): 5_439_488,
}
# name: B_ref, budget, DRC, ADT, RT, epochs, optimizer, lr, start's accuracy, BCD's
EXPECTED = {
    "resnet18-cifar100-15k": (30_000, 15_000, 100, 0.3, 50, 20, "sgd", 1e-3, 67.17, 68.85),
    "resnet18-tiny-59.1k": (80_000, 59_100, 100, 0.3, 50, 5, "sgd", 1e-3, 54.24, 56.6),
    "wrn22-8-cifar10-240k": (400_000, 240_000, 100, 0.1, 50, 20, "adam", 3.5e-5, 94.24, 95.29),
    "wrn22-8-tiny-488.8k": (570_000, 488_800, 300, 0.1, 50, 5, "adam", 3.5e-5, 64.42, 65.04),
    "resnet18-cifar100-autorep-6k": (30_000, 6_000, 100, 0.1, 50, 20, "adam", 3.5e-5, 71.63, 72.94),
    "ablation-drc-500": (30_000, 15_000, 500, 0.3, 50, 20, "sgd", 1e-3, 67.17, 62.68),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_settings(name) -> None:
    r = ROWS[name]
    settings = (r.b_ref, r.budget, r.drc, r.adt, r.rt, r.epochs, r.optimizer, r.lr)
    assert (*settings, r.published_start, r.published) == EXPECTED[name]


def test_every_row_can_be_run() -> None:
    """Their nets and data exist, and the net has more ReLUs than B_ref."""
    sources = [row.source for row in ROWS.values()]
    counts = {source: sources.count(source) for source in sources}
    assert counts == {"Table 2": 16, "Table 3": 10, "Figure 4": 7, "Figure 5": 10}
    for name, row in ROWS.items():
        assert row.start == ("autorep" if "autorep" in name else "snl")
        assert row.arch in models.NAMES
        assert row.data in KNOWN
        assert row.budget < row.b_ref < FULL[row.arch, row.shape().image_size]


def test_rows_agree_with_the_published_curves() -> None:
    """The numbers were entered twice: from the tables and from the figures."""
    methods = {"snl": ("SNL", "BCD"), "autorep": ("AutoReP", "BCD on AutoReP")}
    curves = {
        (curve.arch, curve.data, curve.method): dict(curve.points)
        for curve in published.every_curve()
    }
    compared = 0
    for name, row in ROWS.items():
        values = (row.published_start, row.published)
        for method, value in zip(methods[row.start], values, strict=True):
            curve = curves.get((row.arch, row.data, method), {})
            if row.budget in curve and "ablation" not in name:
                assert curve[row.budget] == value, name
                compared += 1
    assert compared >= 60


def test_the_plan_and_the_list(capsys) -> None:
    """2.78 PFLOP of scoring and 4.44 of fine-tuning per step on ResNet18 and CIFAR."""
    paper.main(["resnet18-cifar100-15k", "--dry-run"])
    text = capsys.readouterr().out
    assert "0.555 G multiply-adds" in text
    assert "1  dense        160 epochs: 26.7 PFLOP" in text
    assert "in 150 steps of 100" in text
    assert "at most 7,500 passes: 416.6 PFLOP, 2.78 per step" in text
    assert "3,000 epochs, 20 per step, sgd 0.001: 666.6 PFLOP, 4.44 per step" in text
    assert "SNL 67.17 %, BCD 68.85 %" in text
    assert ROWS["wrn22-8-tiny-200k"].steps() == 334, "the last step is a short one"
    paper.main([])
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(ROWS)
    with pytest.raises(SystemExit):
        paper.main(["resnet18-cifar100-16k"])


@pytest.mark.filterwarnings("ignore:after 1 epochs:RuntimeWarning")  # SNL ends above its budget
@pytest.mark.parametrize("name", ["resnet18-cifar100-15k", "resnet18-cifar100-autorep-15k"])
def test_the_stages(name, tmp_path, capsys, monkeypatch) -> None:
    """Dense training, start and BCD; the same command resumes after an interruption."""
    row = ROWS[name]
    line = [name, "--tiny", "--device", "cpu", "--run-dir"]

    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fastbcd, "bcd", interrupted)
        with pytest.raises(KeyboardInterrupt):
            paper.main([*line, str(tmp_path / "cut")])
    state = tmp_path / "cut" / f"2-{row.start}" / "state.safetensors"
    written = state.stat().st_mtime_ns
    paper.main([*line, str(tmp_path / "cut")])
    assert state.stat().st_mtime_ns == written, "a finished stage was run again"
    paper.main([*line, str(tmp_path / "whole")])
    assert "3 of 3: bcd to 1,600 ReLUs" in capsys.readouterr().out
    folders = ["1-dense", f"2-{row.start}", "3-bcd"]
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == folders
    cut, whole = (fastbcd.load_run(tmp_path / folder / "3-bcd") for folder in ("cut", "whole"))
    assert [step.before for step in whole.history] == [1_700, 1_640]
    assert whole.masks.count() == 1_600
    assert all(torch.equal(cut.weights[name], tensor) for name, tensor in whole.weights.items())
