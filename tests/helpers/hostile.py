"""Seeds for the fuzzers of tests/hostile: a few fixed ones, or many for a given time.

`make test` runs the fixed seeds. `make test-all` sets FASTBCD_HOSTILE_SECONDS and continues with
random seeds until that many seconds have passed. FASTBCD_HOSTILE_SEED=n repeats one of them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator


def seeds(count: int) -> Iterator[int]:
    """0, 1, ... count - 1, then random seeds while there is time.

    The seed of a failing case is printed, for FASTBCD_HOSTILE_SEED.
    """
    end = time.monotonic() + float(os.environ.get("FASTBCD_HOSTILE_SECONDS", 0))
    only = os.environ.get("FASTBCD_HOSTILE_SEED")
    if only is not None:
        yield int(only)
        return
    for seed in range(count):
        yield _announced(seed)
    while time.monotonic() < end:
        yield _announced(random.SystemRandom().randrange(count, 2**31))


def _announced(seed: int) -> int:
    print(f"FASTBCD_HOSTILE_SEED={seed}")  # pytest shows it if the case fails
    return seed
