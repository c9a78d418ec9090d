"""Units: texts such as 100Mbit, 40ms and 20MB as numbers, and numbers as texts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from reprlib import repr as shortened

PREFIXES = "nµm kMGT"  # of 1000 ** -3, …, 1000 ** 4
_TIME = r"(?:(?P<prefix>[muµn]?)(?P<unit>s))?"


def bits_per_second(value: float | str) -> float:
    """A bandwidth with its unit.

    >>> bits_per_second("100Mbit"), bits_per_second("40 MB/s")
    (100000000.0, 320000000.0)
    """
    number, unit = _read(value, r"(?P<prefix>[kMGT]?)(?P<unit>bit|b|B)(?:/s|ps)?")
    if value == math.inf:
        return math.inf
    if not (unit and 0 < number < math.inf):
        raise ValueError(
            f"bandwidth={shortened(value)}; give it with its unit, such as '100Mbit'"
        )
    if unit == "B":
        return 8 * number
    return number


def round_trip(value: float | str) -> float:
    """A time with its unit, in seconds; 0 needs none.

    >>> round_trip("40ms"), round_trip(0)
    (0.04, 0.0)
    """
    number, unit = _read(value, _TIME)
    if not 0 <= number < math.inf or (number and unit is None):
        raise ValueError(
            f"rtt={shortened(value)}; give it with its unit, such as '40ms'"
        )
    return number


def in_seconds(value: float | str) -> float:
    """A time of 0 or more; seconds if there is no unit.

    >>> in_seconds("40ms"), in_seconds("2"), in_seconds(0.5)
    (0.04, 2.0, 0.5)
    """
    number, _ = _read(value, _TIME)
    if not 0 <= number < math.inf:
        raise ValueError(
            f"seconds={shortened(value)}; give seconds, 0 or more, or '800ms'"
        )
    return number


def in_bytes(value: float | str) -> float:
    """A number of bytes, 0 or more.

    >>> in_bytes("20MB"), in_bytes(1000)
    (20000000.0, 1000.0)
    """
    number, _ = _read(value, r"(?P<prefix>[kMGT]?)(?P<unit>B?)")
    if not 0 <= number < math.inf:
        raise ValueError(f"bytes={shortened(value)}; give bytes, 0 or more, or '20MB'")
    return number


def si(value: float | None, unit: str = "") -> str:
    """A value with three digits and a unit prefix, or as it is without a unit.

    >>> si(87_425_024, "B"), si(2.2e-6, "s"), si(0, "s"), si(None, "s")
    ('87.4 MB', '2.20 µs', '0 s', 'unknown')
    """
    if value is None:
        return "unknown"
    if not value or not unit:
        return f"{value:,g} {unit}".rstrip()
    highest = 4
    if unit == "s":
        highest = 0
    power = math.floor(math.log10(value) / 3 + 1e-12)
    power = max(-3, min(highest, power))
    scaled = value / 1000.0**power
    digits = max(0, 2 - math.floor(math.log10(scaled)))
    prefix = PREFIXES[power + 3].strip()
    return f"{scaled:,.{digits}f} {prefix}{unit}"


def columns(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Rows as text: the first cell to the left, the others to the right in so many characters.

    >>> columns([["site", "ReLUs"], ["layer1", "64"]], width=8)
    ['site     ReLUs', 'layer1      64']
    """
    longest = max(len(row[0]) for row in rows)
    lines = []
    for name, *cells in rows:
        line = name.ljust(longest)
        for cell in cells:
            line += cell.rjust(width)
        lines.append(line.rstrip())
    return lines


def _read(value: float | str, units: str) -> tuple[float, str | None]:
    """The number in the unit without a prefix, NaN if there is none, and the unit."""
    if isinstance(value, str):
        text = re.fullmatch(
            rf"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*{units}", value.strip()
        )
        if text is None:
            return math.nan, None
        prefix = (text["prefix"] or " ").replace("u", "µ")
        power = PREFIXES.index(prefix) - 3
        return float(text[1]) * 1000.0**power, text["unit"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan, None
    try:
        return float(value), None
    except OverflowError:  # an int with more than 308 digits
        return math.inf, None
