"""The figures: what is drawn of runs and of published curves, and that it fits."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

import fastbcd
from fastbcd import private
from fastbcd.report import figures, published, writer
from fastbcd.report.classes import ClassAccuracy
from fastbcd.report.results import Point, Result, result_of
from fastbcd.runs.config import TITLES


@pytest.fixture(autouse=True)
def style():
    with figures.style():
        yield


def result(name: str, method: str, arch: str | None = None) -> Result:
    """A result on CIFAR-100 of which only the accuracies are drawn."""
    facts = SimpleNamespace(net=SimpleNamespace(arch=arch and {"name": arch}))
    facts.data = SimpleNamespace(name="cifar100")
    run: Any = SimpleNamespace(title=method, config=facts)
    nothing: Any = None
    points = [Point(99, 2.0), Point(9, 1.0)]
    return Result(name, run, "test accuracy", points, nothing, nothing)


def test_published_curves_are_those_of_the_net_and_data() -> None:
    curves = published.curves("resnet18", "cifar100")
    known = result("run", "BCD", "resnet18")
    assert writer._published(known) == curves
    assert writer._published(known._replace(measured="train accuracy")) == []
    assert writer._published(result("run", "BCD")) == []


def test_a_method_has_one_colour_and_mark() -> None:
    """Its runs differ in their dashes, published curves are thin."""
    looks = figures.LOOKS["methods"]
    assert len({look["color"] for look in looks.values()}) == len(looks)
    assert len({look["marker"] for look in looks.values()}) == len(looks)
    curves = published.every_curve()
    assert {*TITLES.values(), "linearize", *(curve.method for curve in curves)} <= {*looks}
    runs = [result(name, "BCD") for name in "ab"]
    (axes,) = figures.accuracy(runs, published.curves("resnet18", "cifar10")).axes
    lines = {line.get_label(): line for line in axes.lines if line.get_label()[0] != "_"}
    ours = [line for label, line in lines.items() if "BCD" in label]
    assert len(ours) == 3
    look = {(line.get_color(), line.get_marker()) for line in ours}
    assert look == {(looks["BCD"]["color"], looks["BCD"]["marker"])}
    assert lines["paper: BCD"].get_linewidth() < lines["BCD: a"].get_linewidth()
    assert lines["BCD: a"].get_linestyle() != lines["BCD: b"].get_linestyle()


def test_start_way_down_and_final_training_are_told_apart() -> None:
    """The dotted line begins where the last removals were tested, at the budget."""
    points = [Point(99, 8.0), Point(50, 6.0), Point(9, 3.0, True), Point(9, 7.0, True)]
    figure = figures.accuracy([result("run", "BCD")._replace(points=points)], [])
    (axes,) = figure.axes
    down, trained, start, now = (list(map(tuple, line.get_xydata())) for line in axes.lines)
    assert down == [(99, 8), (50, 6), (9, 3)]
    assert trained == [(9, 3), (9, 3), (9, 7)]
    assert (start, now) == ([(99, 8)], [(9, 7)])
    assert len({line.get_linestyle() for line in axes.lines}) == 3  # of two marks: none
    names = [text.get_text() for text in figure.legends[0].texts]
    assert names == ["BCD: run", "steps that only train"]
    assert [text.get_text().strip() for text in axes.texts] == ["start: 8.00 %", "now: 7.00 %"]


def test_the_accuracy_of_each_class() -> None:
    rows = [ClassAccuracy("class 7", 5, 40.0, 60.0), ClassAccuracy("class 1", 9, 80.0, 75.0)]
    (axes,) = figures.classes(rows).axes
    assert [text.get_text() for text in axes.texts] == ["40.0 (-20.0)", "80.0 (+5.0)"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["class 7 (5)", "class 1 (9)"]
    before, now = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert (before, now) == ([60, 75], [40, 80])
    (alone,) = figures.classes([row._replace(before=None) for row in rows]).axes
    assert [text.get_text() for text in alone.texts] == ["40.0", "80.0"]


def test_shares_have_linear_bars(finished) -> None:
    """8 of 98 ReLUs are kept: the bar is 8.16 % of the full one."""
    (axes,) = figures.sites(result_of(finished)).axes
    assert axes.get_xscale() == "linear"
    assert axes.get_xlim()[0] == 0
    assert [round(bar.get_width(), 2) for bar in axes.patches] == [100, 100, 8.16]


def test_the_time_of_each_site_is_a_bar_of_rounds_bytes_and_computation() -> None:
    kept = fastbcd.MaskSet.full({"a": (100,), "b": (50,), "c": (10,)}).without(range(60, 150))
    cost = private.cost(kept, "crypten", bandwidth="1Mbit", rtt="10ms")
    figure = figures.seconds(cost)
    (axes,) = figure.axes
    for bars, term in zip(axes.containers, ("latency", "transfer", "compute"), strict=True):
        expected = [getattr(site, term) for site in cost.sites]
        assert [bar.get_width() for bar in bars] == pytest.approx(expected)
    starts = [bar.get_x() for bar in axes.containers[2]]
    assert starts == pytest.approx([site.latency + site.transfer for site in cost.sites])
    names = [text.get_text() for text in figure.legends[0].texts]
    assert names == ["rounds", "bytes", "computation"]


def test_linear_layers_have_bars_below_the_sites() -> None:
    cost = private.cost(fastbcd.models.resnet20(10, image_size=8, width=4, blocks=1), "crypten")
    (axes,) = figures.seconds(cost).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [part.name for part in (*cost.sites, *cost.layers)]
    assert len(cost.layers) > 8
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[2]]
    assert ends == pytest.approx([part.seconds for part in (*cost.sites, *cost.layers)])


@pytest.mark.parametrize("counts", [(13_912, 13_932), (700, 14_000), (3, 3_000_000), (50, 50)])
def test_labels_of_a_log_axis_have_room(counts) -> None:
    figure, axes = figures.canvas(3)
    axes.plot(counts, (0, 1))
    figures.relu_axis(axes)
    figure.draw_without_rendering()
    low, high = axes.get_xlim()
    ticks = axes.xaxis.get_major_ticks()
    shown = [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]
    boxes = [label.get_window_extent() for label in shown]
    assert len(boxes) >= 2
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


@pytest.mark.parametrize("length", [5, 25, 45, 400])
def test_a_legend_is_within_the_figure(length) -> None:
    """With names such as linearize-resnet18-cifar100-15000; the axes keep their room."""
    runs = [result("n" * length, method) for method in ("BCD", "linearize")]
    curves = published.curves("resnet18", "cifar100")
    figure = figures.accuracy(runs, curves)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width
    assert figure.axes[0].get_window_extent().height > 500
    assert len(legend.texts) == len(runs) + len(curves)
