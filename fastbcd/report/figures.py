"""The figures of a report, one function each, to be called within `style()`.

They are readable on a phone and in black and white: one column wide, with large letters, and
lines and bars differ in dashes, markers, width or hatching, never in colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from fastbcd.masking.masks import MaskSet
from fastbcd.private.costs import Cost, si
from fastbcd.report.published import Curve
from fastbcd.runs.read import SavedRun

WIDTH, DPI = 4.7, 200  # inches; 940 pixels
FONT: Any = {
    "font.size": 9.5, "axes.titlesize": 10.5, "legend.fontsize": 8.5, "font.family": "sans-serif",
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
}  # fmt: skip

# marker, dashes and colour of a method in every figure
METHODS: dict[str, tuple[str, Any, str]] = {
    "BCD": ("s", "-", "#0072b2"),
    "SNL": ("x", (0, (1, 1)), "#d55e00"),
    "DeepReDuce": ("^", (0, (4, 1.5)), "#009e73"),
    "CryptoNAS": ("v", (0, (4, 1, 1, 1)), "#a6761d"),
    "Sphynx": ("D", (0, (7, 2)), "#cc79a7"),
    "SENet": ("P", (0, (2, 1)), "#d55e00"),
    "SENet++ (d_r = 0.5)": ("<", (0, (5, 1, 1, 1, 1, 1)), "#009e73"),
    "SENet++ (d_r = 1.0)": (">", (0, (1, 2)), "#a6761d"),
    "AutoReP": ("*", (0, (3, 2)), "#56b4e9"),
    "BCD on AutoReP": ("h", (0, (8, 1)), "#56b4e9"),
}
OTHER = ("+", ":", "0.4")
# dashes and marker filling of this report's runs
RUNS: tuple[tuple[Any, str], ...] = (
    ("-", "black"), ((0, (5, 1.5)), "white"), ((0, (1, 1)), "0.6"), ((0, (4, 1, 1, 1)), "black"),
)  # fmt: skip
PHASES = {"finetune": ("o", "-"), "score": ("s", "--"), "propose": ("^", ":"), "test": ("D", "-."),
          "save": ("x", (0, (1, 3))), "epoch": ("v", "-")}  # fmt: skip


class Line(NamedTuple):
    """The points (ReLUs, percent) of a run, or a single one such as the dense net."""

    label: str
    points: Sequence[tuple[int, float]]


def accuracy(
    runs: Sequence[Line], single: Sequence[Line], published: Sequence[Curve], *, label: str
) -> Any:
    """Accuracy against ReLU count on a log axis; published curves thin, runs thick and black."""
    figure, axes = canvas(4.0 + 0.2 * ((len(runs) + len(single) + len(published) + 1) // 2))
    for number, (name, points) in enumerate(runs):
        dashes, filling = RUNS[number % len(RUNS)]
        plot(axes, points, name, marks=5 if published else 12, marker="o", linestyle=dashes,
             linewidth=1.7, markersize=5.5, markerfacecolor=filling, zorder=5)  # fmt: skip
    for (name, points), marker in zip(single, "DsPX^v" * len(single), strict=False):
        plot(axes, points, name, marker=marker, linestyle="none", markersize=8,
             markeredgewidth=1.4, zorder=6)  # fmt: skip
    for curve in published:
        marker, dashes, colour = METHODS.get(curve.method, OTHER)
        plot(axes, curve.points, f"paper: {curve.method}", marks=99, marker=marker,
             linestyle=dashes, color=colour, linewidth=1, markerfacecolor=colour)  # fmt: skip
    relu_axis(axes)
    axes.set_ylabel(label)
    _legend_below(figure, axes)
    return figure


def sites(stage: SavedRun) -> Any:
    """The share of its ReLUs that each site had at the start (hatched) and keeps now (black)."""
    now = stage.start if stage.masks is None else stage.masks
    places, full = range(len(now.sites)), [site.numel for site in now.sites]
    figure, axes = canvas(1.5 + 0.27 * len(places))
    axes.barh(places, [100] * len(places), 0.84, color="0.88", edgecolor="0.6", linewidth=0.6,
              label="full net")  # fmt: skip
    if stage.start.count() < stage.start.total:
        axes.barh(places, _shares(stage.start, full), 0.58, color="white", edgecolor="0.25",
                  hatch="/////", linewidth=0.6, label="start")  # fmt: skip
    axes.barh(places, _shares(now, full), 0.26, color="black", label="now")
    counts = [f"{kept:,} of {n:,}" for kept, n in zip(now.counts().values(), full, strict=True)]
    for place, text in enumerate(counts):
        axes.annotate(text, (100, place), (4, 0), textcoords="offset points", va="center",
                      weight="bold" if text.startswith("0 ") else "normal", size=8)  # fmt: skip
    room = 2.9 * max(map(len, counts))
    axes.set(xlabel="ReLUs kept, % of the site", xlim=(0, 100 + room), xticks=range(0, 101, 20))
    axes.set_yticks(places, [site.name for site in now.sites])
    axes.set_ylim(len(places) - 0.4, -0.6)  # execution order from the top
    axes.grid(axis="x", alpha=0.3)
    _legend_below(figure, axes, columns=3)
    return figure


def _shares(masks: MaskSet, full: Sequence[int]) -> list[float]:
    return [100 * kept / n for kept, n in zip(masks.counts().values(), full, strict=True)]


def overlaps(bcd: SavedRun | None, start: SavedRun | None) -> Any:
    """IoU of masks: the paper's score of consecutive masks, and the overlap with the start."""
    figure, axes = canvas(3.6)
    epochs = consecutive(start)
    if start and epochs:
        name = f"{start.title}, consecutive epochs: |both| / |smaller|"
        plot(axes, epochs, name, marker="x", linestyle=":")
    if bcd:
        counts = [bcd.start.count(), *(step["after"] for step in bcd.history)]
        plot(axes, [(n, 1.0) for n in counts], "BCD, any two masks: |both| / |smaller|",
             marker="o", markerfacecolor="black")  # fmt: skip
        plot(axes, [(n, n / max(counts[0], 1)) for n in counts],
             "BCD, with its start: |both| / |either|", marker="s", linestyle="--")  # fmt: skip
    relu_axis(axes)
    axes.set(ylim=(0, 1.06), ylabel="overlap of masks")
    _legend_below(figure, axes, columns=1)
    return figure


def consecutive(start: SavedRun | None) -> list[tuple[int, float]]:
    """(ReLUs, IoU with the epoch before) of a mask training."""
    history = start.history if start else []
    return [(r["count"], r["iou"]) for r in history if r.get("iou") is not None]


def steps(bcd: SavedRun) -> Any:
    """Hypotheses tried in each step, and accuracy before and after the removal and at the end."""
    figure, (upper, lower) = canvas(5.4, rows=2)
    for accepted, look, name in (
        (True, {"color": "0.35"}, "one met ADT"),
        (False, {"facecolor": "white", "edgecolor": "black", "hatch": "/////"}, "none did"),
    ):
        chosen = [s for s in bcd.history if s["accepted"] is accepted]
        if chosen:
            upper.bar([s["number"] for s in chosen], [s["tried"] for s in chosen], 0.8,
                      linewidth=0.6, label=name, **look)  # fmt: skip
    upper.set(ylabel="hypotheses tried", ylim=(0, 1.3 * max(s["tried"] for s in bcd.history)))
    upper.legend(loc="upper right", ncols=2, frameon=False)
    for field, name, marker, dashes in (
        ("base_accuracy", "train, before the removal", "o", "-"),
        ("chosen_accuracy", "train, right after it", "o", ":"),
        ("test_accuracy", "test, after the step", "s", "--"),
    ):
        points = [(s["number"], s[field]) for s in bcd.history if s[field] is not None]
        if points:
            plot(lower, points, name, marker=marker, linestyle=dashes)
    lower.set(xlabel="step", ylabel="accuracy, %")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    _legend_below(figure, lower, columns=1)
    return figure


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
    for phase in spent:
        marker, dashes = PHASES.get(phase, ("+", "-"))
        points = [(s["number"], s["seconds"][phase]) for s in bcd.history if phase in s["seconds"]]
        plot(lower, points, phase, marker=marker, linestyle=dashes)
    lower.set(xlabel="step", ylabel="seconds", yscale="log")
    lower.xaxis.get_major_locator().set_params(integer=True)
    lower.grid(alpha=0.3)
    _legend_below(figure, lower, columns=3)
    return figure


def costs(found: Mapping[str, Sequence[Cost]]) -> Any:
    """Seconds of private inference by protocol, one mark for each of the named masks.

    found: costs under the same protocols in the same order for all masks.
    """
    protocols = [cost.protocol.name for cost in next(iter(found.values()))]
    figure, axes = canvas(1.3 + 0.9 * len(protocols))
    known = [cost.known_seconds for several in found.values() for cost in several]
    left = max(min(known), max(known) / 1e6) / 3  # 0 has no place on a log axis
    marks = {"full net": ("s", "0.88"), "start": ("D", "white"), "now": ("o", "black")}
    for row, (name, several) in enumerate(found.items()):
        marker, filling = marks[name]
        shift = (row - (len(found) - 1) / 2) * 0.84 / len(found)
        places = [place + shift for place in range(len(protocols))]
        seconds = [max(cost.known_seconds, left) for cost in several]
        axes.plot(seconds, places, marker=marker, linestyle="none", color="black", markersize=7,
                  markerfacecolor=filling, label=name)  # fmt: skip
        for place, x, cost in zip(places, seconds, several, strict=True):
            text = f"{seconds_text(cost)}, {si(cost.bytes, 'B')}"
            axes.annotate(text, (x, place), (8, 0), textcoords="offset points", va="center",
                          fontsize=8)  # fmt: skip
    axes.set(xscale="log", xlim=(left, max(known) * 150), xlabel="seconds (log axis), and bytes")
    axes.set_yticks(range(len(protocols)), protocols)
    axes.set_ylim(len(protocols) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    _legend_below(figure, axes, columns=3)
    return figure


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
    return matplotlib.rc_context(FONT)


def canvas(height: float, rows: int = 1, heights: Sequence[float] | None = None) -> Any:
    """A figure of the report's width, `height` inches high, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    return figure, figure.subplots(rows, 1, height_ratios=heights)


def relu_axis(axes: Any) -> None:
    """ReLUs on a log axis, labelled 500, 6K, 100K; linear near 0 if there is a 0."""
    from matplotlib.ticker import LogLocator, NullLocator

    if axes.dataLim.x0 <= 0:
        axes.set_xscale("symlog", linthresh=1, linscale=0.4)
    else:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e4 else (1,)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_thousands)
    axes.set_xlabel("ReLUs kept (log axis)")
    axes.grid(alpha=0.3)


def plot(axes: Any, points: Any, label: str, *, marks: int = 12, **look: Any) -> None:
    """A black line with open markers at some of its points, unless `look` says otherwise."""
    x, y = zip(*points, strict=True)
    usual = {"color": "black", "markersize": 4.5, "markerfacecolor": "white"}
    axes.plot(x, y, label=label, markevery=every(len(x), marks), **{**usual, **look})


def every(points: int, most: int) -> list[int]:
    """The points that get a marker, at most `most`, with the first and the last.

    >>> every(5, most=12), every(850, most=3)
    ([0, 1, 2, 3, 4], [0, 424, 849])
    """
    if points <= most:
        return list(range(points))
    return [round(i * (points - 1) / (most - 1)) for i in range(most)]


def _thousands(value: float, place: Any = None) -> str:
    """
    >>> _thousands(15_000), _thousands(300), _thousands(2e6)
    ('15K', '300', '2M')
    """
    for unit, letter in ((1e6, "M"), (1e3, "K")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def _legend_below(figure: Any, axes: Any, columns: int = 2) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False,
                  handlelength=3.2, fontsize=FONT["legend.fontsize"])  # fmt: skip
