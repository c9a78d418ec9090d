"""Random numbers that are a function of what they are for: equal in every process and run."""

from __future__ import annotations

import numpy as np

from fastbcd.runtime.validate import check_whole

# The streams: what the numbers are for. Two are used twice, with other steps and trials.
MASKS = 0
ORDER = 1
VIEWS = 2
PLACES = 3
RANKS = 3
AUGMENT = 4
SHUFFLE = 4
SITES = 5


def philox(
    stream: int, *, seed: int, step: int, trial: int = 0, epoch: int = 0
) -> np.random.Philox:
    """The generator of (stream, seed, step, trial, epoch).

    Only its `random_raw` is used, which is the same in every version of numpy.

    >>> philox(MASKS, seed=0, step=1).random_raw() == philox(MASKS, seed=0, step=1).random_raw()
    True
    """
    numbers = {"seed": seed, "step": step, "trial": trial, "epoch": epoch}
    for name, number in numbers.items():
        check_whole(name, number, 0, most=2**63 - 1)
    key = np.array([stream, seed], np.uint64)
    # It counts in the lowest word.
    counter = np.array([0, trial, epoch, step], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def uniform(generator: np.random.Philox, count: int) -> np.ndarray:
    """The next random numbers above 0 and below 1, float64 [count]."""
    return ((generator.random_raw(count) >> np.uint64(11)) + 0.5) * 2.0**-53
