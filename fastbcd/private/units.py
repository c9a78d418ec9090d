"""Units: bandwidths, times and sizes as numbers or as texts such as 100Mbit, 40ms and 20MB."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

PREFIXES = "nµm kMGT"  # of 1000 ** -3, …, 1000 ** 4


def bits_per_second(value: float | str, name: str = "bandwidth") -> float:
    """A bandwidth above 0; bits per second if there is no unit.

    >>> bits_per_second("100Mbit"), bits_per_second("40 MB/s"), bits_per_second(1e9)
    (100000000.0, 320000000.0, 1000000000.0)
    """
    number, unit = _read(value, r"(?P<prefix>[kMGT]?)(?P<unit>bit|b|B)?(?:/s|ps)?")
    if not number > 0:
        wanted = "give bits per second, above 0, or a text such as 100Mbit or 40MB/s"
        raise ValueError(f"{name}={value!r}; {wanted}")
    if unit == "B":
        return 8 * number
    return number


def in_seconds(value: float | str, name: str = "rtt") -> float:
    """A time of 0 or more; seconds if there is no unit.

    >>> in_seconds("40ms"), in_seconds("2"), in_seconds(0.5)
    (0.04, 2.0, 0.5)
    """
    number, _ = _read(value, r"(?:(?P<prefix>[muµn]?)(?P<unit>s))?")
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={value!r}; give seconds, 0 or more, or a text such as 40ms")
    return number


def in_bytes(value: float | str, name: str = "bytes") -> float:
    """A number of bytes, 0 or more.

    >>> in_bytes("20MB"), in_bytes(1000)
    (20000000.0, 1000.0)
    """
    number, _ = _read(value, r"(?P<prefix>[kMGT]?)(?P<unit>B?)")
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={value!r}; give bytes, 0 or more, or a text such as 20MB")
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
        text = re.fullmatch(rf"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*{units}", value.strip())
        if text is None:
            return math.nan, None
        prefix = (text["prefix"] or " ").replace("u", "µ")
        power = PREFIXES.index(prefix) - 3
        return float(text[1]) * 1000.0**power, text["unit"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan, None
    return float(value), None
