"""The rows of the paper's tables: their settings, their plans, and their stages on a small net."""

from __future__ import annotations

import json

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
    assert "dense     160 epochs: training 26.7 PFLOP" in text
    assert "in 150 steps of 100, ADT 0.3, RT 50, 20 epochs each by sgd 0.001" in text
    assert "training 666.6 PFLOP, scoring at most 416.6, 13.9 h" in text
    assert "SNL 67.17 %, BCD 68.85 %" in text
    assert ROWS["wrn22-8-tiny-200k"].steps() == 334, "the last step is a short one"
    paper.main(["resnet18-cifar100-autorep-15k", "--dry-run", "--method", "linearize"])
    text = capsys.readouterr().out
    assert "to 15,000 ReLUs in 60 epochs, poly: training 13.3 PFLOP, 0.1 h" in text
    assert "AutoReP 72.93 %, BCD 73.70 %" in text
    paper.main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(ROWS)
    with pytest.raises(SystemExit):
        paper.main(["resnet18-cifar100-16k"])


NO_WARNING = pytest.mark.filterwarnings("ignore:after 1 epochs:RuntimeWarning")
PATHS = ["resnet18-cifar100-15k", "resnet18-cifar100-autorep-15k", "wrn22-8-cifar10-50k"]


def tiny(out, *arguments: str) -> list[dict]:
    """The lines of results.jsonl after a run on small nets."""
    paper.main([*arguments, "--tiny", "--device", "cpu", "--epochs", "1", "--out", str(out)])
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@NO_WARNING  # SNL ends above its budget
def test_rows_share_stages_and_are_recorded_once(tmp_path) -> None:
    for method in paper.METHODS:
        tiny(tmp_path, *PATHS, "--method", method)
    nets = ["resnet18-fashion-mnist-mini", "wide_resnet22_8-fashion-mnist-mini"]
    expected = {f"dense-{net}-0" for net in nets} | {f"snl-{net}-1700-0" for net in nets}
    expected |= {f"autorep-{nets[0]}-1700-0", "results.jsonl"}
    expected |= {f"{name}-tiny-{end}-0" for name in PATHS for end in ("bcd", "linearize-1")}
    assert {path.name for path in tmp_path.iterdir()} == expected
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/state.safetensors")}
    lines = tiny(tmp_path, *PATHS, "--method", "linearize")
    assert written == {path: path.stat().st_mtime_ns for path in written}
    assert [line["row"] for line in lines] == [f"{name}-tiny" for name in PATHS * 2]
    for line, name in zip(lines, PATHS * 2, strict=True):
        assert line["relus"] == 1_600
        assert line["published"] == ROWS[name].published
        assert line["difference"] == round(line["accuracy"] - line["published"], 4)
    replaced = {
        name: fastbcd.load_run(tmp_path / f"{name}-tiny-linearize-1-0").replacement
        for name in PATHS
    }
    assert list(replaced.values()) == ["line", "poly", "line"]


@NO_WARNING
def test_an_interrupted_row_resumes_at_its_stage(tmp_path, monkeypatch) -> None:
    """To the weights of one that was not interrupted."""
    name = PATHS[0]

    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fastbcd, "bcd", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiny(tmp_path / "cut", name)
    state = tmp_path / "cut" / "snl-resnet18-fashion-mnist-mini-1700-0" / "state.safetensors"
    written = state.stat().st_mtime_ns
    tiny(tmp_path / "cut", name)
    assert state.stat().st_mtime_ns == written, "a finished stage was run again"
    tiny(tmp_path / "whole", name)
    cut, whole = (
        fastbcd.load_run(tmp_path / folder / f"{name}-tiny-bcd-0") for folder in ("cut", "whole")
    )
    assert [step.before for step in whole.history] == [1_700, 1_640]
    assert all(torch.equal(cut.weights[name], tensor) for name, tensor in whole.weights.items())


@pytest.mark.long
@NO_WARNING
@pytest.mark.parametrize("method", paper.METHODS)
def test_every_row_runs(method, tmp_path) -> None:
    lines = tiny(tmp_path, "--all", "--method", method)
    assert [line["row"] for line in lines] == [f"{name}-tiny" for name in ROWS]
