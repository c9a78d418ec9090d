"""What a report shows of each run: accuracies, costs, and the facts of its table."""

from __future__ import annotations

import copy
import os
import re
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from fastbcd import private
from fastbcd.masking.masks import set_masks
from fastbcd.private.costs import Cost, seconds_text
from fastbcd.private.units import si
from fastbcd.runs.read import SavedRun, load_run
from fastbcd.runs.step import Step

ACTIVATIONS = "private inference, activations only"
WHOLE = "private inference of one image"


class Point(NamedTuple):
    """A measured accuracy on the way of a run."""

    relus: int
    accuracy: float  # percent
    trained: bool = False  # at the budget, where steps only train


class Result(NamedTuple):
    """A run and the private inference of its net, at the start and now."""

    name: str
    run: SavedRun
    measured: str  # "test accuracy", or "train accuracy" without a test set
    points: list[Point]  # of the start, of each step, and now
    before: Cost
    after: Cost


def result_of(path: str | os.PathLike[str], **connection: Any) -> Result:
    """A run directory, and its cost under this protocol and connection."""
    run = load_run(path)
    metric = _text(run.settings.get("metric") or "accuracy")
    steps = [step for step in run.history if isinstance(step, Step)]
    tested = [(run.start.count(), run.begin.test_accuracy, False)]
    tested += [(step.after, step.test_accuracy, step.drc == 0) for step in steps]
    tested.append((run.count, run.accuracy, tested[-1][2]))
    measured = f"test {metric}"
    points = [Point(n, value, only) for n, value, only in tested if value is not None]
    if not points:
        measured = f"train {metric}"
        points = [
            Point(step.before, step.base_accuracy, step.drc == 0) for step in steps
        ]
    before, after = _costs(run, connection)
    name = run.path.resolve().name
    return Result(name, run, measured, points, before, after)


def _costs(run: SavedRun, connection: dict[str, Any]) -> tuple[Cost, Cost]:
    """At the start and now: of the whole inference, if the net can be built from the run."""
    if run.weights is None or "name" not in (run.config.net.arch or {}):
        connection = {"poly": run.poly, "line": run.line, **connection}
        after = private.cost(run.masks or run.start, **connection)
        return private.cost(run.start, **connection), after
    image = torch.zeros(1, *run.config.data.shape)
    start = copy.deepcopy(run.model)
    set_masks(start, run.start)
    before = private.cost(start, images=image, **connection)
    return before, private.cost(run.model, images=image, **connection)


def counted(cost: Cost) -> str:
    """What the seconds of a cost are those of."""
    if cost.layers:
        return WHOLE
    return ACTIVATIONS


def headline(result: Result) -> dict[str, str]:
    """Accuracy, ReLUs and seconds of private inference, each before and after."""
    accuracies = [f"{point.accuracy:.2f} %" for point in result.points]
    accuracies = accuracies or ["not measured"]
    return {
        result.measured: _change(accuracies[0], accuracies[-1]),
        "ReLUs": _change(f"{result.run.start.count():,}", f"{result.run.count:,}"),
        counted(result.after): _change(
            seconds_text(result.before), seconds_text(result.after)
        ),
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
