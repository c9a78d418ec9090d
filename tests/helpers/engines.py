"""Which engines of private inference are installed here."""

from __future__ import annotations

import pytest

from fastbcd.private.running import interpreter_of


def need(engine: str) -> None:
    """Skip the test, with the commands that install the engine, where it is missing."""
    try:
        interpreter_of(engine, None)
    except ImportError as error:
        pytest.skip(str(error))
