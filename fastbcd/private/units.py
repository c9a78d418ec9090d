"""Units: bandwidths, times and sizes as numbers or as texts such as 100Mbit, 40ms and 20MB."""

from __future__ import annotations

import math
import re

_FACTORS = {"n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def bits_per_second(value: float | str, name: str = "bandwidth") -> float:
    """A bandwidth above 0; bits per second if there is no unit.

    >>> bits_per_second("100Mbit"), bits_per_second("40 MB/s"), bits_per_second(1e9)
    (100000000.0, 320000000.0, 1000000000.0)
    """
    number, unit = _read(value, r"(?P<prefix>[kMGT]?)(?P<unit>bit|b|B)?(?:/s|ps)?")
    if not number > 0:
        wanted = "give bits per second, above 0, or a text such as 100Mbit or 40MB/s"
        raise ValueError(f"{name}={value!r}; {wanted}")
    return number * (8 if unit == "B" else 1)


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


def _read(value: float | str, units: str) -> tuple[float, str | None]:
    """The number in the unit without a prefix, NaN if there is none, and the unit."""
    if isinstance(value, str):
        text = re.fullmatch(rf"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*{units}", value.strip())
        if text is not None:
            return float(text[1]) * _FACTORS.get(text["prefix"], 1.0), text["unit"]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return float(value), None
    return math.nan, None
