"""The figures of a report, one function each, to be called within `style()`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import resources
from typing import Any

import numpy as np

from fastbcd.private.costs import Cost
from fastbcd.private.units import si
from fastbcd.report.classes import ClassAccuracy
from fastbcd.report.published import Curve
from fastbcd.report.results import Result, connection_of

HERE = resources.files("fastbcd.report")
LOOKS = json.loads((HERE / "figures.json").read_text("utf-8"))
DASHES = ("-", "--", ":", "-.")  # of several runs


def accuracy(results: Sequence[Result], published: Sequence[Curve]) -> Any:
    """Accuracy against ReLUs: one colour and mark per method, published curves thin.

    Each run has a hollow mark at its start, a line on its way down, a dotted one where it only
    trains, and a large filled mark at the net as it is now.
    """
    figure, axes = canvas(4.2 + 0.17 * (len(results) + len(published)))
    methods = LOOKS["methods"]
    for curve in published:
        label = f"paper: {curve.method}"
        axes.plot(
            *zip(*curve.points, strict=True),
            label=label,
            lw=0.9,
            **methods[curve.method],
        )
    measured = results[0].measured
    drawn = [
        result for result in results if result.points and result.measured == measured
    ]
    for number, result in enumerate(drawn):
        _draw_way(axes, result, dashes=DASHES[number % len(DASHES)])
    if len(drawn) == 1:
        first = drawn[0].points[0]
        last = drawn[0].points[-1]
        annotate(axes, f"start: {first.accuracy:.2f} %", first[:2], left=True)
        annotate(axes, f"  now: {last.accuracy:.2f} %", last[:2])
    relu_axis(axes)
    axes.set_ylabel(f"{measured}, %")
    return with_legend(figure)


def _draw_way(axes: Any, result: Result, dashes: str) -> None:
    """The points of a run: the way down, then the steps that only train."""
    look = {"zorder": 5} | {
        name: LOOKS["methods"][result.run.title][name] for name in ("color", "marker")
    }
    down = [point[:2] for point in result.points if not point.trained]
    trained = [point[:2] for point in result.points if point.trained]
    if trained and trained[0][0] < down[-1][0]:
        down.append(trained[0])  # the last removals were not tested on their own
    label = f"{result.run.title}: {result.name[:40]}"
    every = max(1, len(down) // 12)
    axes.plot(*zip(*down, strict=True), ls=dashes, label=label, markevery=every, **look)
    if trained:
        axes.plot(
            *zip(down[-1], *trained, strict=True),
            color=look["color"],
            ls=":",
            lw=2.5,
            label="steps that only train",
        )
    axes.plot(*down[0], ms=10, ls="", **look)
    look["markerfacecolor"] = look["color"]
    axes.plot(*result.points[-1][:2], ms=8, ls="", **look)


def sites(result: Result) -> Any:
    """The share of its ReLUs that each site had at the start (hatched) and keeps now (black)."""
    figure, axes = named_rows([site.name for site in result.after.sites])
    places = range(len(result.after.sites))
    units = np.array([site.units for site in result.before.sites])
    start = np.array([site.relus for site in result.before.sites])
    now = np.array([site.relus for site in result.after.sites])
    for name, relus in {"full net": units, "start": start, "now": now}.items():
        axes.barh(places, 100 * relus / units, label=name, **LOOKS["shares"][name])
    for place in places:
        annotate(axes, f"{now[place]:,} of {units[place]:,}", (100, place))
    axes.set_xlabel("ReLUs kept, % of the site")
    axes.set_xlim(0, 145)
    axes.set_xticks(range(0, 101, 20))
    return with_legend(figure)


def seconds(cost: Cost) -> Any:
    """The seconds of each site and layer: rounds, bytes and computation in one bar."""
    parts = [*cost.sites, *cost.layers]
    figure, axes = named_rows([part.name for part in parts])
    rows = range(len(parts))
    ends = np.zeros(len(parts))
    for term, look in LOOKS["terms"].items():
        widths = np.array([getattr(part, term) or 0.0 for part in parts])
        axes.barh(rows, widths, 0.7, left=ends, **look)
        ends += widths
    for row, part in enumerate(parts):
        text = si(ends[row], "s")
        if part.seconds is None:
            text = f"≥ {text}"
        annotate(axes, text, (ends[row], row))
    if cost.layers:
        axes.axhline(len(cost.sites) - 0.5, color="0.2", lw=0.8)
    axes.set_xlabel(f"seconds: {connection_of(cost)}")
    axes.set_xlim(0, 1.3 * max(ends.max(), 1e-9))
    return with_legend(figure)


def classes(rows: Sequence[ClassAccuracy]) -> Any:
    """The accuracy of each class, before (hatched) and now (black), rarest class first."""
    figure, axes = named_rows([f"{row.name} ({row.images:,})" for row in rows])
    places = range(len(rows))
    looks = LOOKS["shares"]
    if rows[0].before is not None:
        before = [row.before for row in rows]
        axes.barh(places, before, label="before", **looks["start"])
    axes.barh(places, [row.now for row in rows], label="now", **looks["now"])
    for place, row in enumerate(rows):
        text = f"{row.now:.1f}"
        if row.before is not None:
            text += f" ({row.now - row.before:+.1f})"
        annotate(axes, text, (max(row.now, row.before or 0.0), place))
    axes.set_xlabel("test accuracy of the class, %")
    axes.set_xlim(0, 135)
    axes.set_xticks(range(0, 101, 20))
    return with_legend(figure)


# ------------------------------------------------------------------------------- shared


def style() -> AbstractContextManager[None]:
    """The settings for drawing; ImportError says how to install matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            f"a report is drawn with matplotlib ({error}): pip install 'fastbcd[plot]'"
        ) from error
    return matplotlib.rc_context(fname=str(HERE / "figures.mplstyle"))


def canvas(height: float) -> Any:
    """A figure 940 pixels wide and `height` inches high, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.7, height))
    return figure, figure.subplots()


def named_rows(names: Sequence[str]) -> Any:
    """A figure with one row per name, from the top."""
    figure, axes = canvas(1.6 + 0.27 * len(names))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False, axis="y")
    return figure, axes


def relu_axis(axes: Any) -> None:
    """A log axis, labelled 500, 6k, 100k; linear near 0, and where all values are alike."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set_xlabel("ReLUs kept")
    least, _, most, _ = axes.dataLim.extents
    locator: Any = MaxNLocator(4)
    if least <= 0:
        axes.set_xscale("symlog", linthresh=min(1, axes.dataLim.minposx), linscale=0.4)
        locator = axes.xaxis.get_major_locator()
    elif most > 5 * least:
        axes.set_xscale("log")
        locator = LogLocator() if most > 1e4 * least else LogLocator(subs=(1, 2, 5))
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def annotate(axes: Any, text: str, point: Any, *, left: bool = False) -> None:
    """Small text at the right of a point, or left of its mark."""
    shift = 4
    side = "left"
    if left:
        shift = -9
        side = "right"
    where = {"xytext": (shift, 0), "textcoords": "offset points"}
    axes.annotate(text, point, **where, ha=side, va="center", size=8)


def with_legend(figure: Any) -> Any:
    """The figure with a legend below its axes, in up to three columns."""
    _, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        width = max(16, *map(len, labels))
        figure.legend(loc="outside lower center", ncols=max(1, 48 // width))
    return figure
