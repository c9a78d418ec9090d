"""Bounds on an accuracy difference from a random part of the images, valid at every look.

Two nets answer the same N images. A *loss* is an image that only the first answers correctly, a
*gain* one that only the second does; D = losses - gains, over all N, decides. So far n images have
been drawn at random without replacement.

    evidence(d) = M / max { P(K) : K_losses - K_gains = d }

P(K) is the probability of the sequence of losses, gains and others that was seen, if K says how
many of each there are among all N. M is the mean of P(K) over K drawn from a fixed prior. For the
true K, M / P(K) is a martingale of mean 1 as more images are drawn, and evidence(D) is never
larger. So (Ville's inequality) the chance that evidence(D) ever reaches 1/error is at most
`error`, however often one looks. The d with less evidence are an interval that holds D at all
looks, with probability 1 - error. docs/confidence.md has the proof in full.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fastbcd.runtime.validate import check_number
from fastbcd.scoring.metric import Metric

# M draws the shares of losses, gains and others from Dirichlet(1/2, 1/2, b): b and its weight.
PRIORS = {3.0: 0.125, 30.0: 0.125, 300.0: 0.125, 3000.0: 0.125, 30000.0: 0.5}


def log_evidence(losses: Any, gains: Any, seen: int, total: int, difference: Any) -> np.ndarray:
    """The logarithm of the evidence against D = difference; inf: it is impossible.

    Elementwise, for arrays of losses, gains and differences. It is convex in the difference.

    >>> log_evidence(0, 0, 3000, 10_000, [0, 30]).round(1)
    array([-0.6, 10.1])
    """
    lost, gained, d = np.broadcast_arrays(
        *(np.asarray(a, np.int64) for a in (losses, gains, difference))
    )
    return _log_mixture(lost, gained, seen) - _largest(lost, gained, seen, total, d)


def _largest(lost: np.ndarray, gained: np.ndarray, seen: int, total: int, d: Any) -> np.ndarray:
    """log of the largest P(K) with K_losses - K_gains = d; -inf if there is none.

    log P(K) is a sum of terms log K!/(K - count)!, each concave in K. They are taken as linear
    between whole numbers, so that the result is concave in d.
    """
    table, others = _log_factorials(total), seen - lost - gained

    def falling(k: np.ndarray, count: np.ndarray) -> np.ndarray:
        """log (k/2)! / (k/2 - count)!"""
        low, high = k // 2, (k + 1) // 2
        return (table[low] - table[low - count] + table[high] - table[high - count]) / 2

    def log_p(t: np.ndarray) -> np.ndarray:
        """For K_gains = t/2: concave in t."""
        rest = total - t - d
        return falling(t + 2 * d, lost) + falling(t, gained) + table[rest] - table[rest - others]

    low, last = 2 * np.maximum(gained, lost - d), total - others - d
    possible = low <= last
    low, last = np.where(possible, low, 2 * gained), np.where(possible, last, 2 * gained)
    d, high = np.where(possible, d, lost - gained), last
    while (low < high).any():  # the first t from which P does not grow
        middle = (low + high) // 2
        grows = log_p(np.minimum(middle + 1, last)) > log_p(middle)
        low, high = np.where(grows & (low < high), middle + 1, low), np.where(grows, high, middle)
    return np.where(possible, log_p(low) - (table[total] - table[total - seen]), -np.inf)


def _log_mixture(lost: np.ndarray, gained: np.ndarray, seen: int) -> np.ndarray:
    """log M: Pólya's urns with (1/2, 1/2, b) balls at the start."""
    flips = _log_gamma(lost + 0.5) + _log_gamma(gained + 0.5) - math.log(math.pi)
    urns = [
        math.log(weight) + math.lgamma(b + 1) - math.lgamma(b + 1 + seen) - math.lgamma(b)
        + _log_gamma(b + seen - lost - gained) for b, weight in PRIORS.items()
    ]  # fmt: skip
    return flips + np.logaddexp.reduce(urns, axis=0)


def _log_gamma(x: np.ndarray) -> np.ndarray:
    return torch.lgamma(torch.from_numpy(np.asarray(x, np.float64))).numpy()


@lru_cache(4)
def _log_factorials(n: int) -> np.ndarray:
    """log k! for k = 0 .. n + 1."""
    return _log_gamma(np.arange(1.0, n + 3))


def interval(losses: int, gains: int, seen: int, total: int, error: float) -> tuple[int, int]:
    """The least and the largest D with less evidence against it than 1/error.

    >>> interval(2, 1, 5000, 10_000, 0.001), interval(2, 1, 10_000, 10_000, 0.001)
    ((-18, 24), (1, 1))
    """
    now, ahead = losses - gains, total - seen
    guess = round(now * total / max(seen, 1))
    inside = np.full(2, min(max(guess, now - ahead), now + ahead))
    outside = now + np.array([-1, 1]) * (ahead + 1)
    while (abs(outside - inside) > 1).any():
        middle = (inside + outside) // 2
        holds = log_evidence(losses, gains, seen, total, middle) < -math.log(error)
        inside, outside = np.where(holds, middle, inside), np.where(holds, outside, middle)
    return int(inside[0]), int(inside[1])


def check_confidence(confidence: float | None, metric: Metric | None) -> None:
    """Refuse what is no probability, and metrics whose values are not 0 or 1.

    >>> check_confidence(99.9, None)
    Traceback (most recent call last):
    ValueError: confidence=99.9; it must be above 0 and below 1, such as 0.999, or None: exact
    """
    if confidence is None:
        return
    check_number("confidence", confidence)
    if not 0 < confidence < 1:
        way_out = "it must be above 0 and below 1, such as 0.999, or None: exact"
        raise ValueError(f"confidence={confidence}; {way_out}")
    if metric is not None:
        name = getattr(metric, "__name__", type(metric).__name__)
        raise ValueError(
            f"confidence={confidence} bounds the accuracy, not metric={name}; leave one of them out"
        )
