"""The contents of the page, and that it loads nothing else."""

from __future__ import annotations

import base64
import dataclasses
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import report
from fastbcd.report import figures, published, sections, subject
from fastbcd.runs.stages import TITLES, read
from helpers.report_pages import PNG, Page
from helpers.run_cases import records, small_net, small_run

DATA = torch.randn(30, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3


def two_sites() -> nn.Module:
    """Two sites with 60 and 40 ReLUs."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(4, 60), fastbcd.MaskedReLU(60), nn.Linear(60, 40),
        fastbcd.MaskedReLU(40), nn.Linear(40, 3),
    )  # fmt: skip


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
    assert len(shown) == len(files) == 9
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
    assert start == (98, fastbcd.accuracy(net, data.first(20)), [98])
    page, _ = page_of(finished)
    alt = next(i["alt"] for i in page.images if i["alt"].startswith("Test accuracy"))
    assert f"from {start[1]:.2f} % at 98 ReLUs to" in alt


def test_starting_points_and_dense_nets_alone(stages, page_of) -> None:
    page, _ = page_of(stages / "2-snl", stages / "1-dense")
    alt = next(i["alt"] for i in page.images if i["alt"].startswith("Test accuracy"))
    final = records(stages / "2-snl")[-1]["accuracy"]["final"]
    dense = records(stages / "1-dense")[-1]["test_accuracy"]
    assert f"SNL, 2-snl: {final:.2f} % at 60 ReLUs" in alt
    assert f"dense, 1-dense: {dense:.2f} % at 98 ReLUs" in alt
    assert "Steps" not in page.words


def test_overlaps_of_a_start_are_by_epoch_and_of_one_training(stages) -> None:
    """Its masks may all have the budget; those of different trainings are not compared."""
    run = read(stages)
    _, start, bcd = run.stages
    alone, both = (dataclasses.replace(run, stages=s) for s in ((start,), (start, bcd)))
    with figures.style():
        labels = [sections.overlaps(r).figure.axes[0].get_xlabel() for r in (alone, both)]
        first = sections.overlaps(alone).figure.axes[0].lines[0]
    assert labels == ["epoch of the mask training", "ReLUs kept (log axis)"]
    assert first.get_xdata().tolist() == list(range(1, len(first.get_xdata()) + 1))
    trained = [{**record, "training": "stage 1 alone"} for record in start.history]
    several = dataclasses.replace(start, kind="deepreduce", history=trained)
    assert sections.overlaps(dataclasses.replace(run, stages=(several,))) is None


@pytest.mark.parametrize("counts", [(13_912, 13_932), (700, 14_000), (3, 3_000_000), (50, 50)])
def test_labels_of_a_log_axis_have_room(counts) -> None:
    with figures.style():
        figure, axes = figures.canvas(3)
        axes.plot(counts, (0, 1))
        figures.log_axis(axes, "ReLUs")
        figure.draw_without_rendering()
    low, high = axes.get_xlim()
    boxes = [
        tick.label1.get_window_extent()
        for tick in axes.xaxis.get_major_ticks()
        if low <= tick.get_loc() <= high
    ]
    assert len(boxes) >= 2
    assert all(a.x1 < b.x0 for a, b in pairwise(boxes))


def test_an_unfinished_run_is_named_first(cut_short, page_of) -> None:
    page, _ = page_of(cut_short)
    begin = page.source.index("<h1>")
    assert begin < page.source.index("step 2 of about 5") < page.source.index("<section>")
    assert page.row("state")[1] == "not finished"
    assert len(page.images) == 8


def test_one_run_is_one_block_of_cards(finished, cut_short, page_of) -> None:
    """So that the two columns of the page are equally long; several runs have a block each.

    The first block has accuracy against ReLUs and against seconds, which are beside each other.
    """
    source = page_of(finished)[0].source
    assert source.count('<div class="cards">') == 2
    assert source.split('<div class="cards">')[1].count("<section>") == 2
    assert page_of(finished, cut_short)[0].source.count('<div class="cards">') == 4


def test_several_runs(finished, cut_short, page_of) -> None:
    page, folder = page_of(finished, cut_short)
    iou = read(finished).last.masks.iou(read(cut_short).last.masks)
    assert ["whole", "8", "1.000", f"{iou:.3f}"] in page.rows
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


@pytest.mark.parametrize("epochs", [1, 2, 30])
def test_epochs_are_whole_numbers(epochs) -> None:
    with figures.style():
        figure, axes = figures.canvas(3)
        axes.plot(range(1, epochs + 1), [0.5] * epochs, marker="x")
        figures.whole_numbers(axes)
        figure.draw_without_rendering()
    assert {x % 1 for x in axes.get_xticks()} == {0.0}


@pytest.mark.parametrize("length", [5, 30, 45, 400])
def test_a_legend_is_within_the_figure(length) -> None:
    """With names such as linearize-resnet18-cifar100-15000; the axes keep their room."""
    runs = [figures.Line("n" * length, m, [(9, 1.0), (99, 2.0)]) for m in ("BCD", "linearize")]
    with figures.style():
        curves = published.curves("resnet18", "cifar100")
        figure = figures.accuracy(runs, curves, label="%")
        figure.draw_without_rendering()
    (legend,), (axes,) = figure.legends, figure.axes
    assert legend.get_window_extent().width <= figure.bbox.width
    assert axes.get_window_extent().height > 600
    assert len(legend.texts) == len(runs) + len(curves)


def test_seconds_are_those_of_the_masks_after_each_step(tmp_path) -> None:
    """Accuracy against seconds, from the ReLUs of each site that every step recorded."""
    seen = [fastbcd.masks(two_sites()).copy()]
    network = report.Network(1e8, 0.04, protocol="delphi-gc")
    fastbcd.bcd(
        two_sites(), DATA, 10, drc=50, rt=2, test=DATA, run_dir=tmp_path,
        finetune=lambda net, step: seen.append(fastbcd.masks(net).copy()),
    )  # fmt: skip
    run = read(tmp_path)
    with figures.style():
        relus, timed = sections.accuracy([run], subject.subject(run), network)
    (line,) = timed.figure.axes[0].lines
    costs = [fastbcd.private.cost(m, "delphi-gc", bandwidth=1e8, rtt=0.04) for m in seen]
    assert line.get_xdata() == pytest.approx([cost.seconds for cost in costs])
    assert list(line.get_ydata()) == list(relus.figure.axes[0].lines[0].get_ydata())
    assert timed.figure.axes[0].get_xlabel() == "delphi-gc, seconds (log axis)"
    assert timed.figure.axes[0].xaxis.get_major_formatter()(0.05) == "50 ms"
    assert "delphi-gc, 100 Mbit/s, round trip 40.0 ms" in timed.text
    used = sum(n > 0 for n in seen[-1].counts().values())
    assert timed.tables[0].rows[0][2:5] == [10, used, str(used)]


def test_steps_without_their_sites_are_left_out_of_the_seconds(tmp_path) -> None:
    """A run of version 0.1: the start was not tested, and step 2 of 2 has its masks."""
    old = Path(__file__).parents[1] / "runs" / "old_run" / "bcd"
    page = Page(report.write([old], tmp_path))
    assert "1 nets are left out: older versions did not record their sites." in page.text


def test_the_time_of_each_site_is_a_bar_of_rounds_bytes_and_computation() -> None:
    kept = fastbcd.MaskSet.full({"a": (100,), "b": (50,), "c": (10,)}).without(range(60, 150))
    cost = fastbcd.private.cost(kept, "crypten", bandwidth=1e6, rtt=0.01)
    with figures.style():
        (axes,) = figures.site_seconds(cost).axes
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    starts = [[bar.get_x() for bar in bars] for bars in axes.containers]
    for found, term in zip(widths, ("latency", "transfer", "compute"), strict=True):
        assert found == pytest.approx([getattr(site, term) for site in cost.sites])
    assert starts[2] == pytest.approx([s.latency + s.transfer for s in cost.sites])
    assert [text.get_text() for text in axes.texts][1] == "emptied"
    assert [t.get_text() for t in axes.figure.legends[0].texts] == [
        "rounds",
        "bytes",
        "computation",
    ]


def test_a_method_has_one_colour_and_mark(finished, cut_short, stages, resnet18) -> None:
    """Its runs differ in their dashes, published curves are thin, single points share a name."""
    looks = figures.LOOKS["methods"].values()
    assert len({look["color"] for look in looks}) == len({look["marker"] for look in looks})
    assert len({look["color"] for look in looks}) == len(looks)
    assert set(TITLES.values()) | {c.method for c in published.every_curve()} <= {
        *figures.LOOKS["methods"]
    }
    runs = [read(p) for p in (resnet18, finished, cut_short, stages, stages / "2-snl")]
    with figures.style():
        section, _ = sections.accuracy(runs, subject.subject(runs[0]), report.Network())
    lines = section.figure.axes[0].lines
    by_method = {m: [x for x in lines if f"{m}: " in f"{x.get_label()}: "] for m in ("BCD", "SNL")}
    assert len(by_method["BCD"]) == 5, "four runs and the paper's curve"
    for method, found in by_method.items():
        look = figures.look_of(method)
        assert {(x.get_color(), x.get_marker()) for x in found} == {(look["color"], look["marker"])}
    assert {x.get_linewidth() for x in by_method["BCD"]} == {1.7, 0.9}
    names = [text.get_text() for text in section.figure.legends[0].texts]
    assert names.count("SNL") == names.count("dense") == 1
    assert {"BCD: whole", "BCD: stages", "paper: SNL", "paper: SENet"} - {*names} == {
        "paper: SENet"
    }


@pytest.mark.parametrize("method", ["linearize", *TITLES.values(), "BCD on AutoReP"])
def test_every_method_is_drawn_in_its_own_look(method, stages) -> None:
    run = read(stages)
    dense, start, bcd = run.stages
    if method in ("BCD", "linearize"):
        settings = {**bcd.settings, **({method: {}} if method == "linearize" else {})}
        chosen = [dataclasses.replace(bcd, config={**bcd.config, "settings": settings})]
    elif method == "BCD on AutoReP":
        chosen = [dataclasses.replace(start, kind="autorep"), bcd]
    elif method == "dense":
        chosen = [dense]
    else:
        kind = next(kind for kind, title in TITLES.items() if title == method)
        chosen = [dataclasses.replace(start, kind=kind)]
    run = dataclasses.replace(run, stages=tuple(chosen))
    assert run.method == method
    with figures.style():
        both = sections.accuracy([run], subject.subject(run), report.Network())
    for section in both:
        line = section.figure.axes[0].lines[0]
        look = {"color": line.get_color(), "marker": line.get_marker()}
        assert look.items() <= figures.LOOKS["methods"][method].items()
    assert both[1].tables[0].rows[-1][1] == method


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
