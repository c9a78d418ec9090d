"""A warning that is issued once per process."""

from __future__ import annotations

import warnings

_issued: set[str] = set()


def warn_once(text: str, *, stacklevel: int = 2) -> None:
    """Issue a RuntimeWarning unless the same text was issued before.

    >>> warn_once("an example")  # doctest: +SKIP
    RuntimeWarning: an example
    """
    if text not in _issued:
        _issued.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
