"""What a report shows of each run: accuracies, costs, and the facts of its table."""

from __future__ import annotations

import os
import re
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from fastbcd import private
from fastbcd.private.costs import Cost, seconds_text
from fastbcd.private.units import si
from fastbcd.runs.read import SavedRun, load_run
from fastbcd.runs.step import Step

# Accuracies that a starting point records: before and after the fine-tune of its final masks.
DECIDED = ("thresholded", "final")


class Result(NamedTuple):
    """A run and the private inference of its net, at the start and now."""

    name: str
    run: SavedRun
    measured: str  # "test accuracy", or "train accuracy" without a test set
    points: list[tuple[int, float]]  # (ReLUs, accuracy) of the start, of each step, and now
    before: Cost
    after: Cost


def result_of(path: str | os.PathLike[str], **connection: Any) -> Result:
    """A run directory, and its cost under this protocol and connection."""
    run = load_run(path)
    masks = run.start if run.masks is None else run.masks
    metric = _text(run.settings.get("metric") or "accuracy")
    kinds: dict[str, Any] = {"poly": run.poly, "line": run.line}
    points = _tested(run)
    images = "test"
    if not points:
        points = _trained(run)
        images = "train"
    return Result(
        name=run.path.resolve().name,
        run=run,
        measured=f"{images} {metric}",
        points=_ends(points),
        before=private.cost(run.start, **kinds, **connection),
        after=private.cost(masks, **kinds, **connection),
    )


def headline(result: Result) -> dict[str, str]:
    """Accuracy, ReLUs and seconds of private inference, each before and after."""
    accuracies = [f"{accuracy:.2f} %" for _, accuracy in result.points]
    if result.measured.startswith("test") and result.run.begin.test_accuracy is None:
        accuracies = accuracies[-1:]  # the first is not of the start
    return {
        result.measured: _change(*accuracies[:1], *accuracies[-1:]),
        "ReLUs": _change(f"{result.run.start.count():,}", f"{result.run.count:,}"),
        "private inference": _change(seconds_text(result.before), seconds_text(result.after)),
    }


def facts(result: Result) -> dict[str, str]:
    """The rows of the table: results, then settings."""
    run = result.run
    before = result.before
    after = result.after
    data = run.config.data
    shape = "×".join(map(str, data.shape))
    seconds = [sum(record.seconds.values()) for record in run.history]
    used = [str(len(cost.sites) - len(cost.emptied)) for cost in (before, after)]
    return {
        "state": "finished" if run.done else "not finished",
        "method": run.title,
        "net": _text(run.config.net.arch or "of its own"),
        "data": f"{data.name or 'of its own'}, {data.images:,} images of {shape}",
        **headline(result),
        "protocol": after.protocol.name,
        "bandwidth": si(after.bandwidth, "bit/s"),
        "round trip": si(after.rtt, "s"),
        "bytes": _change(si(before.bytes, "B"), si(after.bytes, "B")),
        "rounds": _change(si(before.rounds), si(after.rounds)),
        "sites in use": _change(*used),
        "steps": f"{len(run.history):,}",
        "time": duration(sum(seconds)),
        **_texts(run.settings),
    }


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(5_400), duration(200_000)
    ('75.0 s', '90 min', '56 h')
    """
    for unit, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return si(seconds, "s")


def _tested(run: SavedRun) -> list[tuple[int, float]]:
    """The accuracies on test images, in their order."""
    accuracies = [(run.start.count(), run.begin.test_accuracy)]
    for record in run.history:
        if isinstance(record, Step):
            accuracies.append((record.after, record.test_accuracy))
        else:
            accuracies.append((run.count, record.test_accuracy))
            decided = record.accuracy or {}
            accuracies += [(run.count, decided.get(name)) for name in DECIDED]
    return [(relus, accuracy) for relus, accuracy in accuracies if accuracy is not None]


def _trained(run: SavedRun) -> list[tuple[int, float]]:
    """The accuracies on train images, before each step."""
    steps = [step for step in run.history if isinstance(step, Step)]
    return [(step.before, step.base_accuracy) for step in steps]


def _ends(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The first and the last of consecutive points with one number of ReLUs.

    The others are of steps, or epochs, that only train.

    >>> _ends([(9, 80.0), (5, 60.0), (5, 65.0), (5, 70.0)])
    [(9, 80.0), (5, 60.0), (5, 70.0)]
    """
    ends = []
    for _, group in groupby(points, key=itemgetter(0)):
        first, *others = group
        ends += [first, *others[-1:]]
    return ends


def _change(before: str = "not measured", after: str = "") -> str:
    """Two texts, or one if they are equal."""
    if after in ("", before):
        return before
    return f"{before} → {after}"


def _texts(settings: dict[str, Any]) -> dict[str, str]:
    """The settings that are not None."""
    known = {name: value for name, value in settings.items() if value is not None}
    return {name: _text(value) for name, value in known.items()}


def _text(value: Any) -> str:
    """A setting of config.json; a function by its name.

    >>> _text({"name": "Fraction", "share": 1 / 3}), _text(20_000), _text("function mine.overlap")
    ('name Fraction, share 0.3333', '20,000', 'overlap')
    """
    if isinstance(value, dict):
        return ", ".join(f"{name} {text}" for name, text in _texts(value).items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return re.sub(r"^function .*\.", "", str(value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"
