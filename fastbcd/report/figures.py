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
from fastbcd.report.published import Curve
from fastbcd.report.results import Result, connection_of

HERE = resources.files("fastbcd.report")
LOOKS = json.loads((HERE / "figures.json").read_text("utf-8"))
DASHES = ("-", "--", ":", "-.")  # of several runs


def accuracy(results: Sequence[Result], published: Sequence[Curve]) -> Any:
    """Accuracy against ReLUs: one colour and mark per method, published curves thin.

    The large mark is the net as it is now.
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
        relus, percent = zip(*result.points, strict=True)
        look = {name: methods[result.run.title][name] for name in ("color", "marker")}
        look |= {"linestyle": DASHES[number % len(DASHES)], "zorder": 5}
        label = f"{result.run.title}: {result.name[:40]}"
        axes.plot(
            relus, percent, label=label, markevery=max(1, len(relus) // 12), **look
        )
        axes.plot(relus[-1], percent[-1], ms=8, markerfacecolor=look["color"], **look)
    relu_axis(axes)
    axes.set_ylabel(f"{measured}, %")
    return with_legend(figure)


def sites(result: Result) -> Any:
    """The share of its ReLUs that each site had at the start (hatched) and keeps now (black)."""
    figure, axes = site_canvas(result.after)
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
    """The seconds of each site in private inference: rounds, bytes and computation in one bar."""
    figure, axes = site_canvas(cost)
    places = range(len(cost.sites))
    ends = np.zeros(len(cost.sites))
    for term, look in LOOKS["terms"].items():
        widths = np.array([getattr(site, term) or 0.0 for site in cost.sites])
        axes.barh(places, widths, 0.7, left=ends, **look)
        ends += widths
    for place, site in enumerate(cost.sites):
        text = si(ends[place], "s")
        if site.seconds is None:
            text = f"≥ {text}"
        annotate(axes, text, (ends[place], place))
    axes.set_xlabel(f"seconds: {connection_of(cost)}")
    axes.set_xlim(0, 1.3 * max(ends.max(), 1e-9))
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


def site_canvas(cost: Cost) -> Any:
    """A figure with one row per site, in execution order from the top."""
    names = [site.name for site in cost.sites]
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


def annotate(axes: Any, text: str, point: tuple[float, float]) -> None:
    """Small text to the right of a point."""
    shift = {"xytext": (4, 0), "textcoords": "offset points"}
    axes.annotate(text, point, **shift, va="center", size=8)


def with_legend(figure: Any) -> Any:
    """The figure with a legend below its axes, in up to three columns."""
    _, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        width = max(16, *map(len, labels))
        figure.legend(loc="outside lower center", ncols=max(1, 48 // width))
    return figure
