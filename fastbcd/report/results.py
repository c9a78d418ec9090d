"""What a report shows of each run: accuracies, costs, and the facts of its table."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any, NamedTuple

from fastbcd import private
from fastbcd.private.costs import Cost, seconds_text
from fastbcd.private.units import si
from fastbcd.runs.read import SavedRun, load_run
from fastbcd.runs.step import Step

ACTIVATIONS = "private inference, activations only"


class Result(NamedTuple):
    """A run and the private inference of its net, at the start and now."""

    name: str
    run: SavedRun
    measured: str  # "test accuracy", or "train accuracy" without a test set
    points: list[
        tuple[int, float]
    ]  # (ReLUs, accuracy) of the start, of each step, and now
    before: Cost
    after: Cost


def result_of(path: str | os.PathLike[str], **connection: Any) -> Result:
    """A run directory, and its cost under this protocol and connection."""
    run = load_run(path)
    metric = _text(run.settings.get("metric") or "accuracy")
    kinds: dict[str, Any] = {"poly": run.poly, "line": run.line}
    steps = [step for step in run.history if isinstance(step, Step)]
    tested = [(run.start.count(), run.begin.test_accuracy)]
    tested += [(step.after, step.test_accuracy) for step in steps]
    tested.append((run.count, run.accuracy))
    measured = f"test {metric}"
    points = [(relus, accuracy) for relus, accuracy in tested if accuracy is not None]
    if not points:
        measured = f"train {metric}"
        points = [(step.before, step.base_accuracy) for step in steps]
    return Result(
        name=run.path.resolve().name,
        run=run,
        measured=measured,
        points=points,
        before=private.cost(run.start, **kinds, **connection),
        after=private.cost(run.masks or run.start, **kinds, **connection),
    )


def headline(result: Result) -> dict[str, str]:
    """Accuracy, ReLUs and seconds of private inference, each before and after."""
    accuracies = [f"{accuracy:.2f} %" for _, accuracy in result.points] or [
        "not measured"
    ]
    return {
        result.measured: _change(accuracies[0], accuracies[-1]),
        "ReLUs": _change(f"{result.run.start.count():,}", f"{result.run.count:,}"),
        ACTIVATIONS: _change(seconds_text(result.before), seconds_text(result.after)),
    }


def facts(result: Result) -> dict[str, str]:
    """The rows of the table: results, then settings."""
    run = result.run
    before = result.before
    after = result.after
    data = run.config.data
    shape = "×".join(map(str, data.shape))
    seconds = sum(sum(record.seconds.values()) for record in run.history)
    used = [f"{len(cost.sites) - len(cost.emptied)}" for cost in (before, after)]
    training = sum(getattr(step, "drc", None) == 0 for step in run.history)
    return {
        "state": "finished" if run.done else "not finished",
        "method": run.title,
        "net": _text(run.config.net.arch or "of its own"),
        "data": f"{data.name or 'of its own'}, {data.images:,} images of {shape}",
        **headline(result),
        "protocol": connection_of(after),
        "bytes": _change(si(before.bytes, "B"), si(after.bytes, "B")),
        "rounds": _change(si(before.rounds), si(after.rounds)),
        "sites in use": _change(*used),
        "steps": f"{len(run.history):,}, of which {training:,} only train",
        "time": f"{timedelta(seconds=round(seconds))}",
        **_texts(run.settings),
    }


def connection_of(cost: Cost) -> str:
    """The protocol, and the network between its parties."""
    bandwidth = si(cost.bandwidth, "bit/s")
    return f"{cost.protocol.name}, {bandwidth}, round trip {si(cost.rtt, 's')}"


def _change(before: str, after: str) -> str:
    """Two texts, or one if they are equal."""
    if after == before:
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
