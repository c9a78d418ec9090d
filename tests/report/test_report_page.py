"""The contents of the page, and that it loads nothing else."""

from __future__ import annotations

import base64
import re
import shutil

import pytest
import torch

import fastbcd
from fastbcd import private, report
from fastbcd.report import results
from helpers.report_pages import PNG, Page
from helpers.run_cases import small_net, small_run

WAN = {"protocol": "crypten", "bandwidth": "100Mbit", "rtt": "40ms"}


def headline(page: Page) -> list[str]:
    """The large texts above the figures."""
    return re.findall("<b>(.*?)</b>", page.source)


def test_the_headline_and_the_table_have_the_numbers_of_the_run(finished, page_of) -> None:
    page = page_of(finished, **WAN)
    run = fastbcd.load_run(finished)
    before, after = (private.cost(masks, **WAN) for masks in (run.start, run.masks))
    start = fastbcd.accuracy(small_net(), fastbcd.load("fashion-mnist-mini").first(20))
    texts = [
        f"{start:.2f} % → {run.accuracy:.2f} %",
        "98 → 8",
        f"{before.seconds * 1e3:.0f} ms → {after.seconds * 1e3:.0f} ms",
    ]
    assert headline(page) == texts
    for name, text in zip(("test accuracy", "ReLUs", results.ACTIVATIONS), texts, strict=True):
        assert page.row(name)[1] == text
    assert page.row("bytes")[1] == "45.5 kB → 3.71 kB"
    assert page.row("rounds")[1] == "9"
    assert page.row("steps")[1] == f"{len(run.history)}, of which 0 only train"
    assert page.row("data")[1] == "fashion-mnist-mini, 48 images of 1×28×28"
    assert page.row("adt")[1] == "1"
    assert page.row("state")[1] == "finished"


def test_a_page_loads_nothing_else(finished, cut_short, page_of, tmp_path, drawn) -> None:
    page = page_of(finished, cut_short)
    source = re.sub(r'src="data:[^"]*"', "", page.source)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", source)
    assert not page.tags & {"script", "iframe", "object", "embed", "video", "audio", "base"}
    assert not re.search(r"\son[a-z]+=", source)
    assert all(address.startswith("data:") for address in page.addresses)
    assert "viewport" in page.source
    files = {path.name: path.read_bytes() for path in (tmp_path / "page").glob("*.png")}
    shown = [base64.b64decode(i["src"].partition("base64,")[2]) for i in page.images]
    assert set(shown) == set(files.values())
    assert files.keys() == {
        "accuracy.png", "1-sites.png", "1-seconds.png", "2-sites.png", "2-seconds.png",
    }  # fmt: skip
    assert all(content.startswith(PNG) for content in shown)
    assert all(len(image["alt"]) > 20 for image in page.images)


def test_the_same_run_gives_the_same_page(finished, tmp_path) -> None:
    one, two = (report.write([finished], tmp_path / name) for name in "ab")
    assert one.read_bytes() == two.read_bytes()


def test_an_unfinished_run_is_named_first(cut_short, page_of) -> None:
    page = page_of(cut_short)
    first = page.source.index("cut is not finished: 2 steps, 58 ReLUs left.")
    assert page.source.index("<h1>") < first < page.source.index("<section")
    assert page.row("state")[1] == "not finished"
    assert page.row("ReLUs")[1] == "98 → 58"


def test_a_run_that_has_only_begun(tmp_path, page_of) -> None:
    def interrupted(net: torch.nn.Module, step: fastbcd.Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "new", finetune=interrupted, test=None)
    page = page_of(tmp_path / "new")
    assert "new is not finished: 0 steps, 98 ReLUs left." in page.text
    assert headline(page)[:2] == ["not measured", "98"]


def test_several_runs_have_a_column_each(finished, cut_short, stages, page_of) -> None:
    page = page_of(finished, cut_short, stages / "1-dense", finished)
    assert page.rows[0] == ["", "1. whole", "2. cut", "3. 1-dense", "4. whole"]
    assert page.row("state")[1:] == ["finished", "not finished", "finished", "finished"]
    assert page.row("net")[1:] == ["of its own"] * 4
    assert page.row("budget")[1:] == ["8", "8", "–", "8"]
    assert len(headline(page)) == 4 * 3


def test_steps_that_only_train_are_counted(tmp_path, page_of) -> None:
    """The accuracy of the start is measured, and settings are rounded."""
    data = fastbcd.load("fashion-mnist-mini").first(48)
    run = fastbcd.linearize(
        small_net(), data, 60, epochs=4, test=data.first(20), run_dir=tmp_path, batch_size=16
    )  # fmt: skip
    page = page_of(tmp_path)
    training = [step for step in run.history if step.drc == 0]
    assert page.row("steps")[1] == f"{len(run.history)}, of which {len(training)} only train"
    points = results.result_of(tmp_path).points
    only = [point.trained for point in points]
    assert only == [False, *(step.drc == 0 for step in run.history), True]
    assert [point.relus for point in points] == [98, *(step.after for step in run.history), 60]
    assert "not measured" not in page.text
    assert re.search(r"share 0\.\d{1,5}\b", page.row("drc")[1])


def test_dense_nets_and_starting_points(stages, page_of) -> None:
    """Their accuracy is of the result; an accuracy of the start was not measured."""
    page = page_of(stages / "1-dense", stages / "2-snl")
    dense, snl = (results.result_of(stages / name) for name in ("1-dense", "2-snl"))
    assert page.row("test accuracy")[1:] == [f"{r.points[-1][1]:.2f} %" for r in (dense, snl)]
    assert [point[:2] for point in snl.points] == [(60, snl.run.history[-1].accuracy["final"])]
    assert page.row("ReLUs")[1:] == ["98", "98 → 60"]
    assert page.row("method")[1:] == ["dense", "SNL"]


def test_a_net_that_can_be_built_has_the_cost_of_its_layers_and_classes(tmp_path, page_of) -> None:
    """Of the whole inference; each class against the net before; every figure is explained."""
    net = fastbcd.models.resnet20(10, image_size=28, in_channels=1, width=4, blocks=1)
    data = fastbcd.load("fashion-mnist-mini").first(40)
    fastbcd.bcd(net, data, 9_000, drc=4_000, rt=1, finetune=None, run_dir=tmp_path / "run")
    dense = fastbcd.models.resnet20(10, image_size=28, in_channels=1, width=4, blocks=1)
    page = page_of(tmp_path / "run", test=data, before=dense, **WAN)
    whole = private.cost(
        fastbcd.load_run(tmp_path / "run").model, images=torch.zeros(1, 1, 28, 28), **WAN
    )
    assert page.row(results.WHOLE)[1].endswith(f"{whole.seconds:.2f} s")
    assert whole.layers
    titles = ["against ReLUs", "ReLUs by site", "Seconds by layer", "Accuracy by class, run"]
    assert all(title in page.text for title in titles)
    assert page.source.count('<p class="about">') == len(page.images) == 4
    assert "Private inference: one image" in page.text


def test_a_budget_that_is_a_cost(tmp_path, page_of) -> None:
    target = private.Target(bytes=60_000, bandwidth="100Mbit", rtt="333.333ms", relus=30)
    small_run(tmp_path / "run", budget=target, max_sites=1, finetune=None)
    page = page_of(tmp_path / "run")
    assert page.row("budget")[1].startswith(
        "bytes 6e+04, protocol crypten, bandwidth 1e+08, rtt 0.3333, relus 30"
    )
    assert not re.search(r"\d\.\d{5}", page.text), "no number is unrounded"


def test_a_metric_of_ones_own(tmp_path, page_of) -> None:
    """Its name is shown, and no published curve, which are all of accuracy."""
    small_run(tmp_path / "run", metric=certainty, loss=spread, finetune=None)
    page = page_of(tmp_path / "run")
    assert page.row("metric")[1] == "certainty"
    assert page.row("test certainty")[1].endswith(" %")
    assert page.images[0]["alt"].startswith("test certainty against ReLUs: run ")


def certainty(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.softmax(1).amax(1)


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.var(1)


def test_without_a_test_set_the_train_accuracy_is_shown(tmp_path, page_of) -> None:
    run = small_run(tmp_path / "run", test=None)
    page = page_of(tmp_path / "run")
    first, last = run.history[0], run.history[-1]
    assert page.row("train accuracy")[1] == (
        f"{first.base_accuracy:.2f} % → {last.base_accuracy:.2f} %"
    )


def test_down_to_no_relus_at_all(tmp_path, page_of, drawn) -> None:
    small_run(tmp_path / "run", budget=0, finetune=None)
    page = page_of(tmp_path / "run", protocol="spu-cheetah")
    assert headline(page)[1:] == ["98 → 0", "4.23 s → 4.21 s"]
    assert page.row("sites in use")[1] == "1 → 0"


@pytest.mark.parametrize("name", ["<i>&run", "$x^$"])
def test_names_are_escaped(finished, tmp_path, page_of, drawn, name) -> None:
    """On the page, and in figures, where $ would begin mathematics."""
    shutil.copytree(finished, tmp_path / name)
    page = page_of(tmp_path / name)
    assert "i" not in page.tags
    assert name in page.text
