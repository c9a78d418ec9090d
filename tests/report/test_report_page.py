"""The contents of the page, and that it loads nothing else."""

from __future__ import annotations

import base64
import re
import shutil

import pytest

import fastbcd
from fastbcd import report
from fastbcd.report import figures
from fastbcd.runs.read import read
from helpers.report_pages import PNG, Page
from helpers.run_cases import records, small_net, small_run


def test_numbers_are_those_of_the_history(finished, page_of) -> None:
    page, _ = page_of(finished)
    for r in records(finished):
        row = next(row for row in page.rows if row[0] == str(r["number"]) and len(row) == 11)
        wanted = [f"{r['after']:,}", f"{r['drc']:,}", str(r["tried"]), f"no. {r['chosen']}"]
        wanted += ["yes" if r["accepted"] else "no", f"{r['base_accuracy']:.2f}"]
        wanted += [f"{r['chosen_accuracy']:.2f}", f"{r['test_accuracy']:.2f}", r["engine"]]
        assert row[1:10] == wanted
        assert float(row[10]) == pytest.approx(sum(r["seconds"].values()), abs=0.06)
    last = records(finished)[-1]
    assert page.row("ReLUs kept")[1] == "8 of 98 (8.16%)"
    assert page.row("test accuracy")[1] == f"{last['test_accuracy']:.2f} %"
    assert page.row("hypotheses tried")[1] == str(sum(r["tried"] for r in records(finished)))


def test_masks_and_cost_are_those_of_the_run(finished, page_of) -> None:
    page, _ = page_of(finished)
    counts = fastbcd.masks(small_run(finished).model).counts()
    for name, kept in counts.items():
        assert page.row(name)[3] == str(kept)
    for protocol in fastbcd.private.PROTOCOLS:
        assert [row[2] for row in page.rows if row[0] == protocol][:2] == ["98", "8"]
    kept = fastbcd.MaskSet.full({"2": (2, 7, 7)}).without(range(90))
    cost = fastbcd.private.cost(kept, "crypten", bandwidth=1e9, rtt=1e-3)
    row = next(row for row in page.rows if row[:2] == ["crypten", "now"])
    assert row[3] == f"{cost.bytes / 1000:.2f} kB"


def test_a_page_loads_nothing_else(stages, tmp_path, drawn) -> None:
    page, folder = Page(report.write([stages], tmp_path)), tmp_path
    source = re.sub(r'src="data:[^"]*"', "", page.source)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", source)
    assert not page.tags & {"script", "iframe", "object", "embed", "video", "audio", "base"}
    assert not re.search(r"\son[a-z]+=", source)
    assert all(address.startswith("data:") for address in page.addresses)
    assert "viewport" in page.source
    files = {p.read_bytes() for p in folder.glob("*.png")}
    shown = [base64.b64decode(i["src"].partition("base64,")[2]) for i in page.images]
    assert len(shown) == len(files) == 7
    assert set(shown) == files
    assert all(content.startswith(PNG) for content in shown)
    assert all(len(i["alt"]) > 20 for i in page.images)


def test_the_same_run_gives_the_same_page(stages, tmp_path) -> None:
    one, two = (report.write([stages], tmp_path / name) for name in "ab")
    assert one.read_bytes() == two.read_bytes()


def test_start_and_baseline_of_a_recipe(stages, page_of) -> None:
    page, _ = page_of(stages)
    dense = records(stages / "1-dense")[-1]["test_accuracy"]
    assert page.row("dense accuracy")[1] == f"{dense:.2f} %"
    assert page.row("start")[1].startswith("SNL, 60 ReLUs")
    alt = next(i["alt"] for i in page.images if i["alt"].startswith("Accuracy relative"))
    last = records(stages / "3-bcd")[-1]["test_accuracy"]
    assert alt.endswith(f"to {100 * last / dense:.2f} % at 20 ReLUs")
    ious = [r["iou"] for r in records(stages / "2-snl") if r.get("iou") is not None]
    assert f"score at least {min(ious):.3f} from one epoch to the next" in page.text


def test_a_dense_run_beside_it_is_the_baseline(finished, tmp_path) -> None:
    data = fastbcd.load("fashion-mnist-mini").first(48)
    dense = tmp_path / "dense"
    fastbcd.train(
        small_net(), data, epochs=1, test=data.first(20), run_dir=dense, batch_size=16
    )  # fmt: skip
    page = Page(report.write([finished, dense], tmp_path / "out"))
    accuracy = f"{records(dense)[-1]['test_accuracy']:.2f} %"
    assert page.row("dense accuracy")[1:] == [accuracy, accuracy]
    page = Page(report.write([finished], tmp_path / "out"))
    assert page.row("dense accuracy")[1] == "not measured"
    assert "give --baseline" in page.text
    other = fastbcd.train(
        small_net(), data, epochs=1, test=data.first(19), run_dir=tmp_path / "other", batch_size=16
    )  # fmt: skip
    assert other.history
    page = Page(report.write([finished, tmp_path / "other"], tmp_path / "out"))
    assert page.row("dense accuracy")[1] == "not measured", "measured on other images"


def test_the_start_is_on_the_curve(finished, page_of) -> None:
    """A run of BCD alone: 98 ReLUs and their accuracy come first."""
    net, data = small_net(), fastbcd.load("fashion-mnist-mini").first(48)
    run = read(finished)
    start = run.curve()[0]
    assert start == (98, fastbcd.accuracy(net, data.first(20)))
    page, _ = page_of(finished)
    alt = next(i["alt"] for i in page.images if i["alt"].startswith("Test accuracy"))
    assert f"from {start[1]:.2f} % at 98 ReLUs to" in alt


def test_starting_points_and_dense_nets_alone(stages, page_of) -> None:
    page, _ = page_of(stages / "2-snl", stages / "1-dense")
    alt = next(i["alt"] for i in page.images if i["alt"].startswith("Test accuracy"))
    final = records(stages / "2-snl")[-1]["accuracy"]["final"]
    dense = records(stages / "1-dense")[-1]["test_accuracy"]
    assert f"start (SNL), 2-snl: {final:.2f} % at 60 ReLUs" in alt
    assert f"dense, 1-dense: {dense:.2f} % at 98 ReLUs" in alt
    assert "Steps" not in page.words


def test_an_unfinished_run_is_named_first(cut_short, page_of) -> None:
    page, _ = page_of(cut_short)
    begin = page.source.index("<h1>")
    assert begin < page.source.index("step 2 of about 5") < page.source.index("<section>")
    assert page.row("state")[1] == "not finished"
    assert len(page.images) == 6


def test_one_run_is_one_block_of_cards(finished, cut_short, page_of) -> None:
    """So that the two columns of the page are equally long; several runs have a block each."""
    assert page_of(finished)[0].source.count('<div class="cards">') == 1
    assert page_of(finished, cut_short)[0].source.count('<div class="cards">') == 3


def test_several_runs(finished, cut_short, page_of) -> None:
    page, folder = page_of(finished, cut_short)
    iou = read(finished).last.masks.iou(read(cut_short).last.masks)
    assert page.row("whole")[1:] == ["8", "1.000", f"{iou:.3f}"]
    assert {"1-steps.png", "2-steps.png", "accuracy.png"} <= {p.name for p in folder.iterdir()}
    assert page.row("state")[1:] == ["finished", "not finished"]


def test_runs_of_different_nets(finished, resnet18, page_of) -> None:
    """Each column of the summary names its own net and data; a notice says that they differ."""
    page, _ = page_of(finished, resnet18)
    net, other = page.row("net")[1:]
    assert (net, other) == ("not recorded, 1 sites", "ResNet18, 16 sites")
    assert page.row("data")[2].startswith("CIFAR-100; 50,000 train images 3×32×32")
    assert "Another net or data set than whole: r18." in page.text


def test_the_summary_of_three_runs_fits_a_screen(finished, cut_short, stages, page_of) -> None:
    """It takes both columns of the page, and every cell but a row's name may wrap."""
    page, _ = page_of(finished, cut_short, stages)
    (wide,) = re.findall(r'<section class="wide">(.*?)</section>', page.source, re.DOTALL)
    assert "<h2>Summary</h2>" in wide
    assert "section.wide { column-span: all; }" in page.source
    for row in re.findall("<tr>(.*?)</tr>", wide):
        cells = re.findall(r"<t[dh][^>]*>", row)
        assert len(cells) == 4
        assert all('class="text"' in cell for cell in cells[1:]), row


def test_shares_have_linear_bars(finished) -> None:
    """8 of 98 ReLUs are kept: the bar is 8.16 % of the full one."""
    with figures.style():
        last = read(finished).last
        (axes,) = figures.sites(last.start, last.masks).axes
    assert axes.get_xscale() == "linear"
    assert axes.get_xlim()[0] == 0
    assert [round(bar.get_width(), 2) for bar in axes.patches] == [100, 8.16]


def test_without_a_test_set_nothing_published_is_drawn(tmp_path) -> None:
    small_run(tmp_path / "run", test=None)
    written = report.write([tmp_path / "run"], tmp_path / "out", arch="resnet18", data="cifar10")
    page = Page(written)
    assert "No test set was given" in page.text
    assert not [row for row in page.rows if row[0] == "SNL"]
    assert page.row("test accuracy")[1] == "not measured"


def test_down_to_no_relus_at_all(tmp_path, drawn) -> None:
    small_run(tmp_path / "run", budget=0, finetune=None)
    page = Page(report.write([tmp_path / "run"], tmp_path / "out"))
    assert "1 of 1 sites keep none" in page.text
    assert "Emptied sites, whose rounds are saved: 2." in page.text


def test_names_are_escaped(finished, tmp_path) -> None:
    place = tmp_path / "<b>&run"
    shutil.copytree(finished, place)
    page = Page(report.write([place], tmp_path / "out"))
    assert "b" not in page.tags
    assert "<b>&run" in page.text
