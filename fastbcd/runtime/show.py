"""What long work prints on rank 0: lines, through the logger "fastbcd", and bars.

Lines go to standard output. `logging.getLogger("fastbcd")` with a handler of yours takes them
instead.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from tqdm.auto import tqdm

from fastbcd.runtime import ranks

LOGGER = logging.getLogger("fastbcd")
TIMES = {"days": 86_400, "hours": 3_600, "minutes": 60}


class Lines(logging.Handler):
    """Prints messages above the bars."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(record.getMessage())


def say(text: str) -> None:
    """Print a line above the bars, on rank 0.

    >>> say("resuming the run")
    resuming the run
    """
    if ranks.rank() > 0:
        return
    if not LOGGER.handlers:
        LOGGER.addHandler(Lines())
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False
    LOGGER.info("%s", text)


def bar(show: bool, *each: Any, **options: Any) -> tqdm:
    """A progress bar on a terminal or in a notebook, on rank 0; hidden unless `show`.

    each, options: of `tqdm.tqdm`.

    >>> with bar(False, total=3) as hidden:
    ...     hidden.update()
    """
    seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    visible = show and seen and ranks.rank() == 0
    return tqdm(*each, disable=not visible, smoothing=0, **options)


def duration(seconds: float) -> str:
    """A time as text.

    >>> duration(4), duration(600), duration(275_000)
    ('4.0 seconds', '10.0 minutes', '3.2 days')
    """
    for unit, size in TIMES.items():
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"
