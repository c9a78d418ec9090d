"""Bounds on an accuracy difference from a random part of the images, valid at every look.

Two nets answer the same N images. A *loss* (+1) is an image that only the first answers correctly,
a *gain* (-1) one that only the second does; D, the sum over all N images, decides. Images are drawn
one after the other, never twice, each by its share of the weights that are left.

A gambler bets against D = d. Say the images drawn so far sum to S, and the next one has the change
x and was drawn with the chance q. If D = d, the expectation of x / q is a = d - S, what is left, so

    1 + bet · (a - x / q) / (z - a),     z: the largest 1 / q of an image that is left

has the expectation 1, and is not negative for a bet of 0 to 1. The product over all draws is the
gambler's money, and evidence(d) is its weighted mean over BETS. By Ville's inequality the chance
that it ever reaches 1 / error is at most `error` if D = d, however often one looks. It grows with
d, so the same holds for each D >= d. docs/confidence.md has the proof in full.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

import numpy as np

BETS = {0.05: 0.125, 0.3: 0.125, 0.7: 0.25, 0.99: 0.5}  # and the weight of each


def log_evidence(changes: Any, weights: Any, difference: Any) -> np.ndarray:
    """The logarithm of the evidence against D >= difference, [...]; inf: D is less for certain.

    changes [..., n]: 1 (a loss), -1 (a gain) or 0, in the order of the draws. weights [..., N]: of
    all images, the drawn ones first. It grows with the difference. Against D <= difference: the
    evidence with the other sign of changes and difference.

    >>> log_evidence(np.zeros(3000), np.ones(10_000), [0, 30]).round(1)
    array([0. , 9.9])
    """
    x = np.asarray(changes)
    weights = np.asarray(weights, np.float64)
    d = np.asarray(difference)
    n = x.shape[-1]
    left = weights[..., ::-1].cumsum(-1)[..., ::-1][..., :n]  # at each draw
    largest = left / weights.min(-1, keepdims=True)
    sums = x.cumsum(-1)
    a = np.minimum(d[..., None] - sums + x, largest)  # more is impossible, see below
    drawn = x * (left / weights[..., :n])
    # 1e-9: all images that are left may be losses.
    won = (a - drawn) / (largest * (1 + 1e-9) - a)
    money = [math.log(part) + np.log1p(bet * won).sum(-1) for bet, part in BETS.items()]
    evidence = np.logaddexp.reduce(money)
    needed = d - sums[..., -1]
    ahead = weights.shape[-1] - n
    evidence = np.where(needed <= -ahead, -np.inf, evidence)
    return np.where(needed > ahead, np.inf, evidence)


def interval(changes: np.ndarray, weights: np.ndarray, error: float) -> tuple[int, int]:
    """Holds D, with the probability 1 - error at least; changes [n], weights [N].

    >>> some = np.array([1, 0, -1, 1, 0] * 1000)
    >>> interval(some[:2500], np.ones(5000), 0.001), interval(some, np.ones(5000), 0.001)
    ((666, 1270), (1000, 1000))
    """

    def end(changes: np.ndarray) -> int:
        """The largest d without evidence of 2 / error against D >= d."""
        now = int(changes.sum())
        ahead = len(weights) - len(changes)
        possible = range(now - ahead, now + ahead + 1)
        bar = math.log(2 / error)

        def evidence(d: int) -> float:
            return float(log_evidence(changes, weights, d))

        return possible[bisect_left(possible, bar, key=evidence) - 1]

    return -end(-changes), end(changes)
