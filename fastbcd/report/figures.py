"""The figures of a report, one function each, to be called within `style()`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from fastbcd.masking.masks import MaskSet
from fastbcd.private.costs import Cost
from fastbcd.private.units import si
from fastbcd.report.published import Curve
from fastbcd.runs.stages import SavedRun

HERE = resources.files("fastbcd.report")
LOOKS = json.loads((HERE / "figures.json").read_text("utf-8"))
RELUS = "ReLUs kept"
TERMS = {"rounds": "latency", "bytes": "transfer", "computation": "compute"}  # of a site's seconds


class Line(NamedTuple):
    """The points (ReLUs or seconds, percent) of a run; a dense net or a start is a single one."""

    label: str
    method: str
    points: Sequence[tuple[float, float]]


def accuracy(
    lines: Sequence[Line], published: Sequence[Curve] = (), *, label: str, axis: str = RELUS,
    unit: str = "",
) -> Any:  # fmt: skip
    """Accuracy on a log axis: one colour and mark per method, published curves thin.

    Runs of one method differ in their dashes; its single points have one entry in the legend.
    """
    names = {line.label if len(line.points) > 1 else line.method for line in lines}
    figure, axes = canvas(4.0 + 0.2 * ((len(names) + len(published) + 1) // 2))
    seen: Counter[str] = Counter()
    for name, method, points in sorted(lines, key=lambda line: len(line.points) == 1):
        look = look_of(method)
        if len(points) == 1:
            known = axes.get_legend_handles_labels()[1]
            plot(axes, points, f"_{name}" if method in known else method, linestyle="none",
                 markersize=8, markeredgewidth=1.4, zorder=6, **look)  # fmt: skip
            continue
        dashes = LOOKS["runs"][seen[method] % len(LOOKS["runs"])]
        seen[method] += 1
        plot(axes, points, f"{method}: {name}", marks=5 if published else 12, linewidth=1.7,
             markersize=5.5, zorder=5, **{**look, **dashes, "markerfacecolor": look["color"]},
        )  # fmt: skip
    for curve in published:
        dashes = LOOKS["methods"].get(curve.method, LOOKS["other method"])["published"]
        plot(axes, curve.points, f"paper: {curve.method}", marks=99, linewidth=0.9,
             **look_of(curve.method), dashes=dashes)  # fmt: skip
    log_axis(axes, axis, unit)
    axes.set_ylabel(label)
    return with_legend(figure, axes)


def look_of(method: str) -> dict[str, Any]:
    """Colour and mark of a method."""
    look = LOOKS["methods"].get(method, LOOKS["other method"])
    return {name: look[name] for name in ("color", "marker")}


def sites(start: MaskSet, now: MaskSet) -> Any:
    """The share of its ReLUs that each site had at the start (hatched) and keeps now (black)."""
    full = MaskSet.full({site.name: site.shape for site in now.sites})
    figure, axes = canvas(1.5 + 0.27 * len(now.sites))
    places, sizes = range(len(now.sites)), full.counts().values()
    for (name, look), masks in zip(LOOKS["shares"].items(), (full, start, now), strict=True):
        if name != "start" or start.count() < start.total:
            shares = [100 * k / n for k, n in zip(masks.counts().values(), sizes, strict=True)]
            axes.barh(places, shares, label=name, **look)
    counts = [f"{kept:,} of {n:,}" for kept, n in zip(now.counts().values(), sizes, strict=True)]
    for place, text in enumerate(counts):
        annotate(axes, text, (100, place), weight="bold" if text.startswith("0 ") else "normal")
    room = 2.9 * max(map(len, counts))
    axes.set(xlabel="ReLUs kept, % of the site", xlim=(0, 100 + room), xticks=range(0, 101, 20))
    axes.set_yticks(places, full.counts())
    axes.set_ylim(len(places) - 0.4, -0.6)  # execution order from the top
    axes.grid(False, axis="y")
    return with_legend(figure, axes, columns=3)


def site_seconds(cost: Cost) -> Any:
    """The seconds of each site in private inference: rounds, bytes and computation in one bar."""
    figure, axes = canvas(1.5 + 0.27 * len(cost.sites))
    places, ends = range(len(cost.sites)), np.zeros(len(cost.sites))
    for (name, term), look in zip(TERMS.items(), LOOKS["terms"], strict=True):
        widths = np.array([getattr(site, term) or 0.0 for site in cost.sites])
        axes.barh(places, widths, 0.7, left=ends, label=name, **look)
        ends += widths
    for place, site in enumerate(cost.sites):
        known = si(ends[place], "s") + ("" if site.seconds is not None else " and more")
        annotate(axes, known if site.relus or site.squares else "emptied", (ends[place], place))
    axes.set(xlabel="seconds", xlim=(0, 1.3 * max(ends.max(), 1e-9)))
    axes.set_yticks(places, [site.name for site in cost.sites])
    axes.set_ylim(len(places) - 0.4, -0.6)  # execution order from the top
    axes.grid(False, axis="y")
    return with_legend(figure, axes, columns=3)


def overlaps(bcd: SavedRun | None, start: SavedRun | None) -> Any:
    """IoU of masks: the paper's score of consecutive masks, and the overlap with the start.

    Against ReLUs; for a start alone, which may have one number of them, against its epochs.
    """
    figure, axes = canvas(3.6)
    epochs = consecutive(start, "count" if bcd else "epoch")
    if start and epochs:
        name = f"{start.title}, consecutive epochs: |both| / |smaller|"
        plot(axes, epochs, name, marker="x", linestyle=":")
    if bcd:
        counts = [bcd.start.count(), *(step["after"] for step in bcd.history)]
        plot(axes, [(n, 1.0) for n in counts], "BCD, any two masks: |both| / |smaller|",
             marker="o", markerfacecolor="black")  # fmt: skip
        plot(axes, [(n, n / max(counts[0], 1)) for n in counts],
             "BCD, with its start: |both| / |either|", marker="s", linestyle="--")  # fmt: skip
        log_axis(axes, RELUS)
    else:
        axes.set_xlabel("epoch of the mask training")
        whole_numbers(axes)
    axes.set(ylim=(0, 1.06), ylabel="overlap of masks")
    return with_legend(figure, axes, columns=1)


def consecutive(start: SavedRun | None, x: str = "count") -> list[tuple[int, float]]:
    """(ReLUs or epoch, IoU with the epoch before) of a mask training; none between trainings."""
    history = [r for r in start.history if "training" not in r] if start else []
    return [(r[x], r["iou"]) for r in history if r.get("iou") is not None]


def steps(bcd: SavedRun) -> Any:
    """Hypotheses tried in each step, and accuracy before and after the removal and at the end."""
    figure, (upper, lower) = canvas(5.4, rows=2)
    for accepted, (name, look) in zip((True, False), LOOKS["tried"].items(), strict=True):
        chosen = [s for s in bcd.history if s["accepted"] is accepted]
        if chosen:
            upper.bar([s["number"] for s in chosen], [s["tried"] for s in chosen], label=name,
                      **look)  # fmt: skip
    upper.set(ylabel="hypotheses tried", ylim=(0, 1.3 * max(s["tried"] for s in bcd.history)))
    upper.legend(loc="upper right", ncols=2, handlelength=2)
    for field, look in LOOKS["accuracies"].items():
        points = [(s["number"], s[field]) for s in bcd.history if s[field] is not None]
        if points:
            plot(lower, points, **look)
    lower.set(xlabel="step", ylabel="accuracy, %")
    whole_numbers(upper)
    whole_numbers(lower)
    return with_legend(figure, lower, columns=1)


def times(bcd: SavedRun) -> Any:
    """Seconds by phase: in total, and in each step on a log axis."""
    figure, (upper, lower) = canvas(5.2, rows=2, heights=(1, 1.5))
    spent = dict(sorted(bcd.seconds().items(), key=lambda item: -item[1]))
    whole = sum(spent.values()) or 1.0
    upper.barh(list(spent), list(spent.values()), 0.6, color="0.35")
    for place, value in enumerate(spent.values()):
        upper.annotate(f" {value:,.1f} s, {value / whole:.1%}", (value, place), va="center")
    upper.invert_yaxis()
    upper.set(xlim=(0, 1.45 * max(spent.values())), xlabel="seconds in total")
    upper.locator_params(axis="x", nbins=5)
    upper.grid(False)
    for phase in spent:
        points = [(s["number"], s["seconds"][phase]) for s in bcd.history if phase in s["seconds"]]
        plot(lower, points, phase, **LOOKS["phases"].get(phase, {"marker": "+"}))
    lower.set(xlabel="step", ylabel="seconds", yscale="log")
    whole_numbers(lower)
    return with_legend(figure, lower, columns=3)


def costs(found: Mapping[str, Sequence[Cost]]) -> Any:
    """Seconds of private inference by protocol, one mark for each of the named masks.

    found: costs under the same protocols in the same order for all masks.
    """
    protocols = [cost.protocol.name for cost in next(iter(found.values()))]
    figure, axes = canvas(1.3 + 0.9 * len(protocols))
    known = [cost.known_seconds for several in found.values() for cost in several]
    left = max(min(known), max(known) / 1e6) / 3  # 0 has no place on a log axis
    for row, (name, several) in enumerate(found.items()):
        shift = (row - (len(found) - 1) / 2) * 0.84 / len(found)
        points = [(max(c.known_seconds, left), i + shift) for i, c in enumerate(several)]
        plot(axes, points, name, linestyle="none", markersize=7, **LOOKS["costs"][name])
        for point, cost in zip(points, several, strict=True):
            annotate(axes, f"{seconds_text(cost)}, {si(cost.bytes, 'B')}", point, shift=8)
    axes.set(xscale="log", xlim=(left, max(known) * 150), xlabel="seconds (log axis), and bytes")
    axes.set_yticks(range(len(protocols)), protocols)
    axes.set_ylim(len(protocols) - 0.5, -0.5)
    axes.grid(False, axis="y")
    return with_legend(figure, axes, columns=3)


def seconds_text(cost: Cost) -> str:
    """The seconds of a cost, with ≥ if a part of them is unknown."""
    return ("" if cost.seconds is not None else "≥ ") + si(cost.known_seconds, "s")


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


def canvas(height: float, rows: int = 1, heights: Sequence[float] | None = None) -> Any:
    """A figure 940 pixels wide and `height` inches high, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.7, height))
    return figure, figure.subplots(rows, 1, height_ratios=heights)


def log_axis(axes: Any, label: str, unit: str = "") -> None:
    """A log axis, labelled 500, 6k, 100k, or 50 ms with a unit; linear near 0 if there is a 0."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

    if axes.dataLim.x0 <= 0:
        axes.set_xscale("symlog", linthresh=min(1, axes.dataLim.minposx), linscale=0.4)
    else:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        steps = LogLocator(subs=(1, 2, 5) if high / low < 1e4 else (1,))
        axes.xaxis.set_major_locator(steps if high / low > 5 else MaxNLocator(4))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(EngFormatter(unit, sep=" " if unit else ""))
    axes.set_xlabel(f"{label} (log axis)")


def whole_numbers(axes: Any) -> None:
    """Only whole numbers on the horizontal axis, also if there is one."""
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def plot(axes: Any, points: Any, label: str, *, marks: int = 12, **look: Any) -> None:
    """A line with at most so many markers, at its first and last point, too."""
    x, y = zip(*points, strict=True)
    marked = np.linspace(0, len(x) - 1, min(len(x), marks)).round().astype(int)
    axes.plot(x, y, label=label, markevery=marked.tolist(), **look)


def annotate(axes: Any, text: str, point: tuple[float, float], shift: int = 4, **look: Any) -> None:
    """Small text to the right of a point."""
    axes.annotate(text, point, (shift, 0), textcoords="offset points", va="center", size=8, **look)


def with_legend(figure: Any, axes: Any, columns: int = 2) -> Any:
    """The figure with a legend of the axes below it, in one column if names are too long for more.

    Names that are too long for one are shortened in the middle.
    """
    handles, labels = axes.get_legend_handles_labels()
    labels = [x if len(x) <= 50 else f"{x[:24]}…{x[-25:]}" for x in labels]
    place = {"loc": "outside lower center"}
    legend = figure.legend(handles, labels, ncols=columns, **place)
    if legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        figure.legend(handles, labels, **place)
        figure.set_figheight(figure.get_figheight() + 0.2 * (len(labels) - len(labels) // columns))
    return figure
