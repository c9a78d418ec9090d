"""Epochs, parts of epochs, and learning rates."""

from __future__ import annotations

import math


def epoch_shares(epochs: float) -> list[float]:
    """The share of each epoch's batches that a number of epochs takes: all, and the rest.

    >>> epoch_shares(2.25), epoch_shares(1), epoch_shares(0)
    ([1.0, 1.0, 0.25], [1.0], [])
    """
    whole = math.floor(epochs + 1e-9)
    shares = [1.0] * whole
    if epochs - whole > 1e-9:
        shares.append(epochs - whole)
    return shares


def batches_of(share: float, batches: int) -> int:
    """How many of an epoch's batches a share of it takes: at least one.

    >>> [batches_of(share, 10) for share in (0.01, 0.25, 1.0)]
    [1, 2, 10]
    """
    return min(batches, max(1, round(share * batches)))


def cosine(lr: float, epoch: float, epochs: float, end: float = 0.0) -> float:
    """The rate of CosineAnnealingLR from lr to `end`, stepped once per epoch.

    >>> [round(cosine(0.1, epoch, 4), 3) for epoch in range(4)]
    [0.1, 0.085, 0.05, 0.015]
    """
    return end + (lr - end) * (1 + math.cos(math.pi * epoch / epochs)) / 2
