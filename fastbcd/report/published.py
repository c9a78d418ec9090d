"""The published results: test accuracy against ReLUs, from figures and tables.

published.json holds the numbers, each curve with the figure or table that it is from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec


@dataclass(frozen=True)
class Curve:
    """One method on one net and one data set.

    >>> curves("resnet18", "cifar100")[0].points[0]
    (6000, 61.78)
    """

    arch: str
    data: str
    method: str  # "BCD", "SNL", "AutoReP", "SENet", …
    source: str  # the figure or table, of the paper if it names no other
    points: tuple[tuple[int, float], ...]  # (ReLUs, percent), fewest ReLUs first
    note: str = ""


def curves(arch: str | None, data: str | None) -> list[Curve]:
    """The published curves of a net and a data set: for each method the one with most points.

    >>> [c.method for c in curves("resnet18", "tiny-imagenet")]
    ['BCD', 'SNL', 'DeepReDuce', 'Sphynx', 'ReLUPruner']
    """
    longest: dict[str, Curve] = {}
    for curve in every_curve():
        if (curve.arch, curve.data) == (arch, data):
            other = longest.get(curve.method, curve)
            longest[curve.method] = max(other, curve, key=lambda c: len(c.points))
    return list(longest.values())


@cache
def every_curve() -> tuple[Curve, ...]:
    """All curves of the file; a figure and a table may give the same method twice.

    >>> sorted({curve.arch for curve in every_curve()})
    ['resnet18', 'wide_resnet22_8']
    """
    file = resources.files("fastbcd.report") / "published.json"
    content = msgspec.json.decode(file.read_bytes())
    return msgspec.convert(content["curves"], tuple[Curve, ...])
