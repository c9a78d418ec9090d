"""What a report says about a run's progress, its net and its data set."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastbcd
from fastbcd import report
from fastbcd.report import figures, published, sections, subject
from fastbcd.runs.stages import read
from helpers.report_pages import Page, large_run
from helpers.run_cases import small_net, small_run


def test_progress_of_a_run(finished, cut_short, tmp_path) -> None:
    assert sections.unfinished(read(finished)) is None
    text = sections.unfinished(read(cut_short)) or ""
    assert "cut is not finished: step 2 of about 5, 58 ReLUs left on the way to 8 ReLUs." in text


def test_a_run_that_has_only_begun(tmp_path) -> None:
    def interrupted(net: torch.nn.Module, step: fastbcd.Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "new", finetune=interrupted)
    page = Page(report.write([tmp_path / "new"], tmp_path / "out"))
    assert "new is not finished: step 0 of about 5, 98 ReLUs left" in page.text
    assert "No step is finished yet." in page.text


def test_a_budget_that_is_a_cost(tmp_path) -> None:
    """It is named with its protocol and connection, finished or not."""

    target = fastbcd.private.Target(bytes=20_000, bandwidth="100Mbit", rtt="40ms", relus=30)
    words = "20.0 kB under crypten (100 Mbit/s, round trip 40.0 ms), 30 ReLUs, 1 sites"
    settings = {"budget": target, "max_sites": 1, "run_dir": tmp_path}
    for step in itertools.islice(small_steps(**settings), 2):  # the second one is not finished
        assert step.cost is not None
    page = Page(report.write([tmp_path], tmp_path / "out"))
    assert f"ReLUs left on the way to {words}." in page.text
    assert page.row("budget")[1] == words
    assert len(list(small_steps(**settings))) > 0
    page = Page(report.write([tmp_path], tmp_path / "out"))
    assert page.row("state")[1] == "finished"


def small_steps(**settings: Any) -> Iterator[fastbcd.Step]:
    data = fastbcd.load("fashion-mnist-mini").first(48)
    return fastbcd.steps(small_net(), data, drc=20, rt=3, test=data.first(20), **settings)


@pytest.mark.parametrize("arch", ["resnet18", "wide_resnet22_8"])
@pytest.mark.parametrize("data", ["cifar100", "tiny-imagenet"])
def test_net_and_data_are_those_that_the_run_recorded(arch, data, tmp_path) -> None:
    place = large_run(tmp_path / "run", arch, data)
    assert subject.subject(read(place)) == (arch, data, None)
    as_version_1(place)
    assert read(place).last.config["format"] == "fastbcd.run 1"
    assert subject.subject(read(place)) == (arch, data, None), (
        "by the sizes that version 1 recorded"
    )


def as_version_1(place: Path) -> None:
    """Rewrite config.json as version 1 wrote it: data sets as text, no architecture."""
    path = place / "config.json"
    config = json.loads(path.read_text())
    for name in ("data", "test"):
        d = config[name]
        size = f"{d['images']} × {d['channels']}×{d['height']}×{d['width']} uint8"
        config[name] = f"ImageData({size}, {d['classes']} classes, cpu) {d['digest']}"
    del config["net"]["arch"]
    path.write_text(json.dumps({**config, "format": "fastbcd.run 1"}))


def test_an_own_net_is_not_taken_for_a_known_one(finished) -> None:
    assert subject.subject(read(finished)) == (None, "fashion-mnist-mini", None)
    named = subject.subject(read(finished), "resnet18", "cifar10")
    assert named == ("resnet18", "cifar10", None)


def test_published_curves_of_the_right_net(resnet18, page_of) -> None:
    page, _ = page_of(resnet18, baseline=76.04)
    assert "ResNet18 on CIFAR-100" in page.text
    for metric in (published.ACCURACY, published.RELATIVE):
        for curve in published.curves("resnet18", "cifar100", metric):
            for relus, percent in curve.points:
                assert [curve.method, f"{relus:,}", f"{percent:.2f}"] in [r[:3] for r in page.rows]
    methods = {row[0] for row in page.rows}
    assert {"SNL", "DeepReDuce", "CryptoNAS", "Sphynx", "SENet", "AutoReP", "BCD"} <= methods
    tiny = {f"{n:,}" for c in published.curves("resnet18", "tiny-imagenet") for n, _ in c.points}
    others = {f"{n:,}" for c in published.curves("resnet18", "cifar100") for n, _ in c.points}
    shown = {row[1] for row in page.rows if row[0] == "SNL"}
    assert shown <= others
    assert not shown & (tiny - others)


def test_published_curves_by_name(finished, page_of) -> None:
    page, _ = page_of(finished)
    assert "No published curve is drawn" in page.text
    page, _ = page_of(finished, arch="wide_resnet22_8", data="cifar10")
    assert "Wide-ResNet-22-8 on CIFAR-10" in page.text
    assert ["SNL", "50,000", "92.85", "Table 3"] in page.rows
    page, _ = page_of(finished, arch="resnet20", data="cifar10")
    assert "No such published curve is known for ResNet-20 on CIFAR-10" in page.text


def test_a_run_with_a_metric_of_its_own(tmp_path) -> None:
    """Its name is shown, and no published curve, which are all of accuracy."""
    small_run(tmp_path / "run", metric=certainty, loss=spread, finetune=None)
    written = report.write([tmp_path / "run"], tmp_path / "out", arch="resnet18", data="cifar10")
    page = Page(written)
    assert "ResNet18 on CIFAR-10, judged by certainty: 8 of 98 ReLUs" in page.text
    assert page.row("metric")[1].startswith("certainty; accuracies are its mean")
    missing = "No such published curve is known for ResNet18 on CIFAR-10, judged by certainty."
    assert missing in page.text
    assert not [row for row in page.rows if row[0] == "SNL"]
    with figures.style():
        run = read(tmp_path / "run")
        both = sections.accuracy([run], subject.subject(run), report.Network())
    assert [s.figure.axes[0].get_ylabel() for s in both] == ["test certainty"] * 2


def certainty(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.softmax(1).amax(1)


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.var(1)
