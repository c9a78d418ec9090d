"""Checks of settings: each error names the setting, its value and what is allowed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any


def check_whole(
    name: str,
    value: Any,
    least: float = -math.inf,
    optional: bool = False,
    most: float = math.inf,
) -> None:
    """Refuse what is not a whole number, or one out of bounds; optional: None is allowed.

    >>> check_whole("rt", 0, 1)
    Traceback (most recent call last):
    ValueError: rt=0; it must be a whole number, 1 or more
    """
    if optional and value is None:
        return
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}; it must be a whole number")
    if isinstance(value, bool) or not least <= operator.index(value) <= most:
        bounds = ""
        if least > -math.inf:
            bounds += f", {least:.0f} or more"
        if most < math.inf:
            bounds += f", {most:,} at most"
        raise ValueError(f"{name}={value}; it must be a whole number{bounds}")


def check_number(
    name: str,
    value: Any,
    least: float = -math.inf,
    strictly: bool = False,
    most: float = math.inf,
) -> None:
    """Refuse what is not a finite number of at least (strictly: above) `least`, at most `most`.

    >>> check_number("lr", 0.0, 0, strictly=True)
    Traceback (most recent call last):
    ValueError: lr=0.0; it must be finite and above 0
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}; it must be a number")
    inside = math.isfinite(value) and least <= value <= most
    if not inside or (strictly and value == least):
        bounds = "finite"
        if least > -math.inf:
            bounds += f" and {'above' if strictly else 'at least'} {least:g}"
        if most < math.inf:
            bounds += f" and at most {most:g}"
        raise ValueError(f"{name}={value}; it must be {bounds}")


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Refuse a value that is none of the choices.

    >>> check_choice("optimizer", "lion", ("sgd", "adam"))
    Traceback (most recent call last):
    ValueError: optimizer='lion'; choose from sgd, adam
    """
    allowed = list(choices)
    equal = [choice for choice in allowed if choice == value]
    # 0 == False, which is another choice.
    if not any(isinstance(value, type(choice)) for choice in equal):
        texts = ", ".join(map(str, allowed))
        raise ValueError(f"{name}={value!r}; choose from {texts}")
