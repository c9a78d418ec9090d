"""What long work prints: lines above progress bars, on rank 0."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from fastbcd.runtime import ranks


def say(text: str) -> None:
    """Print a line above the bars, on rank 0.

    >>> say("resuming the run")
    resuming the run
    """
    if ranks.rank() == 0:
        tqdm.write(text)


def bar(show: bool, **options: Any) -> tqdm:
    """A progress bar; hidden unless `show`, and on all ranks but the first.

    options: of `tqdm.tqdm`.

    >>> with bar(False, total=3) as hidden:
    ...     hidden.update()
    """
    return tqdm(disable=not show or ranks.rank() > 0, **options)
