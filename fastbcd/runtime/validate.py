"""Checks of settings that are numbers: each error names the setting, its value and the bounds."""

from __future__ import annotations

import math
import operator
from typing import Any


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number, or too small a one.

    >>> check_whole("rt", 0, 1)
    Traceback (most recent call last):
    ValueError: rt=0; it must be a whole number, 1 or more
    """
    try:
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}; it must be a whole number") from None
    if isinstance(value, bool) or whole < least:
        raise ValueError(f"{name}={value}; it must be a whole number, {least} or more")


def check_number(name: str, value: Any, least: float = -math.inf, strictly: bool = False) -> None:
    """Refuse what is not a finite number of at least (strictly: above) `least`.

    >>> check_number("lr", 0.0, 0, strictly=True)
    Traceback (most recent call last):
    ValueError: lr=0.0; it must be finite and above 0
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}; it must be a number")
    if not math.isfinite(value) or value < least or (strictly and value == least):
        how = "above" if strictly else "at least"
        bound = "" if least == -math.inf else f" and {how} {least:g}"
        raise ValueError(f"{name}={value}; it must be finite{bound}")
