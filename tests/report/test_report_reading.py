"""What is read from a run, and which net and data set it is recognised as."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

import fastbcd
from fastbcd import report
from fastbcd.report import published, sections, subject
from fastbcd.runs.read import read
from helpers.report_pages import Page, large_run, records
from helpers.run_cases import small_run


def test_a_finished_run(finished) -> None:
    chain = read(finished)
    stage = chain.bcd
    assert stage is not None
    assert (chain.name, stage.done, stage.count, stage.steps_to_go()) == ("whole", True, 8, 0)
    assert stage.start.count() == 98
    assert stage.history == records(finished)
    assert chain.curve() == [(r["after"], r["test_accuracy"]) for r in records(finished)]
    assert sections.unfinished(chain) is None


def test_an_unfinished_run(cut_short) -> None:
    chain = read(cut_short)
    stage = chain.bcd
    assert stage is not None
    assert (stage.done, stage.count, len(stage.history), stage.steps_to_go()) == (False, 58, 2, 3)
    said = sections.unfinished(chain) or ""
    assert "cut is not finished: step 2 of about 5, 58 ReLUs left on the way to 8." in said


def test_reading_changes_nothing_and_follows_the_state(finished, tmp_path) -> None:
    """A run that is at work: its history may be ahead of the state, behind it, or cut short."""
    place = tmp_path / "copy"
    shutil.copytree(finished, place)
    lines = (finished / "history.jsonl").read_bytes().splitlines(keepends=True)
    for history in (b"".join(lines[:-1]), b"".join(lines[:-1]) + lines[-1][:20]):
        (place / "history.jsonl").write_bytes(history)
        before = {p.name: p.read_bytes() for p in place.iterdir()}
        stage = read(place).bcd
        assert stage is not None
        found = [{**r, "seconds": None} for r in stage.history]
        assert found == [{**r, "seconds": None} for r in records(finished)]
        assert {p.name: p.read_bytes() for p in place.iterdir()} == before
    (place / "history.jsonl").write_bytes(b"".join(lines))
    (place / "state.previous.safetensors").replace(place / "state.safetensors")
    stage = read(place).bcd
    assert stage is not None
    assert len(stage.history) == 4


def test_a_run_that_has_only_begun(tmp_path) -> None:
    def interrupted(net: torch.nn.Module, step: fastbcd.Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "new", finetune=interrupted)
    chain = read(tmp_path / "new")
    assert (chain.last.count, chain.last.history, chain.curve()) == (98, [], [])
    page = Page(report.write([tmp_path / "new"], tmp_path / "out"))
    assert "new is not finished: step 0 of about 5, 98 ReLUs left" in page.text
    assert "No step is finished yet." in page.text


@pytest.mark.parametrize(("budget", "steps"), [(501, 1), (500, 1), (499, 2), (250, 2), (0, 10)])
def test_steps_to_go_by_the_last_share(finished, budget, steps) -> None:
    """Of 2,000 ReLUs the last step left 1,000; 1000/2^10 is the first below 1."""
    settings = {"budget": budget, "drc": {"schedule": "Fraction", "share": 0.5}}
    history = [{"before": 2000, "drc": 1000, "count": 1000}]
    stage = dataclasses.replace(
        read(finished).last, masks=None, history=history, config={"settings": settings}
    )
    assert stage.steps_to_go() == steps


def test_stages_of_a_chain(stages) -> None:
    chain = read(stages)
    assert [stage.kind for stage in chain.stages] == ["dense", "snl", "bcd"]
    assert all(stage.done for stage in chain.stages)
    assert chain.dense is not None
    final = records(stages / "2-snl")[-1]["accuracy"]["final"]
    assert chain.curve()[0] == (60, final)
    assert chain.dense.accuracy == records(stages / "1-dense")[-1]["test_accuracy"]


def test_masks_of_another_run_are_refused(finished, tmp_path) -> None:
    """The state of step 4 keeps 18 ReLUs; as its start stands that of step 5, with 8."""
    place = tmp_path / "run"
    shutil.copytree(finished, place)
    (place / "state.safetensors").replace(place / "start.safetensors")
    (place / "state.previous.safetensors").replace(place / "state.safetensors")
    with pytest.raises(ValueError, match="keeps 10 ReLUs that its start does not"):
        read(place)


# ------------------------------------------------------------------------------- what it is about


@pytest.mark.parametrize(
    ("arch", "classes", "images", "size", "data"),
    [
        ("resnet18", 10, 50_000, 32, "cifar10"),
        ("resnet18", 200, 100_000, 64, "tiny-imagenet"),
        ("wide_resnet22_8", 100, 50_000, 32, "cifar100"),
        ("resnet18", 100, 49_999, 32, None),
    ],
)
def test_net_and_data_are_recognised(arch, classes, images, size, data, tmp_path) -> None:
    place = large_run(tmp_path / "run", arch, classes, images, size)
    assert subject.subject(read(place)) == (arch, data)


def test_an_own_net_is_not_taken_for_a_known_one(finished) -> None:
    assert subject.subject(read(finished)) == (None, None)
    named = subject.subject(read(finished), "resnet18", "cifar10")
    assert named == ("resnet18", "cifar10")


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
    assert "The paper has no such curve for ResNet-20 on CIFAR-10" in page.text
