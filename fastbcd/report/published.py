"""The published results: accuracy against ReLU count, from figures and tables.

published.json holds the numbers, each curve with the figure or table that it is from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

CONTENT = json.loads((resources.files("fastbcd.report") / "published.json").read_text("utf-8"))
ACCURACY, RELATIVE = "accuracy", "relative to baseline"


@dataclass(frozen=True)
class Curve:
    """One method on one net and one data set.

    >>> curves("resnet18", "cifar100")[0].points[0]
    (6000, 61.78)
    """

    arch: str
    data: str
    method: str  # "BCD", "SNL", "AutoReP", "SENet", …
    metric: str  # "accuracy": of the test set, in percent; or "relative to baseline", in percent
    source: str  # the figure or table, of the paper if it names no other
    points: tuple[tuple[int, float], ...]  # (ReLUs, percent), fewest ReLUs first
    note: str = ""


def curves(arch: str, data: str, metric: str = ACCURACY) -> list[Curve]:
    """The published curves of a net and a data set: for each method the one with most points.

    >>> [c.method for c in curves("resnet18", "tiny-imagenet")]
    ['BCD', 'SNL', 'DeepReDuce', 'Sphynx', 'ReLUPruner']
    """
    if metric not in (ACCURACY, RELATIVE):
        raise ValueError(f"metric={metric!r}; choose {ACCURACY!r} or {RELATIVE!r}")
    found: dict[str, Curve] = {}
    for curve in every_curve():
        if (curve.arch, curve.data, curve.metric) == (arch, data, metric):
            best = found.setdefault(curve.method, curve)
            found[curve.method] = max(best, curve, key=lambda c: len(c.points))
    return list(found.values())


@cache
def every_curve() -> tuple[Curve, ...]:
    """All curves of the file; a figure and a table may give the same method twice.

    >>> sorted({curve.arch for curve in every_curve()})
    ['resnet18', 'wide_resnet22_8']
    """
    points = [tuple((int(n), float(y)) for n, y in c["points"]) for c in CONTENT["curves"]]
    return tuple(
        Curve(**{**c, "points": p}) for c, p in zip(CONTENT["curves"], points, strict=True)
    )


def baseline(arch: str, data: str) -> float | None:
    """The dense net's test accuracy in percent; None if the paper does not state it.

    >>> baseline("resnet18", "cifar100")
    76.04
    """
    found = (b for b in CONTENT["baselines"] if (b["arch"], b["data"]) == (arch, data))
    return next((float(entry["accuracy"]) for entry in found), None)


def distribution() -> dict[str, Any]:
    """ReLUs kept at each site of ResNet18 on CIFAR-100 (Figure 7): "full", and "kept" by method.

    >>> sum(distribution()["kept"]["BCD at 15K"])
    14996
    """
    return CONTENT["distribution"]
