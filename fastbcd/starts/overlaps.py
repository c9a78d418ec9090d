"""How much the masks of a mask training have in common: the paper's IoU over its epochs.

Masks of up to 64 epochs are stored, evenly spread: when there are more, every second one is
dropped, and from then on only every second one is added.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST = 64
PAIRS = 200
PREFIX = "bits."


class Overlaps:
    """Masks [total] by epoch, packed to one bit per unit.

    >>> seen = Overlaps(4)
    >>> seen.add(0, torch.tensor([True, True, True, False]))
    >>> seen.add(1, torch.tensor([True, False, False, True]))
    0.5
    >>> seen.pairs(seed=0)
    [[3, 2, 0.5]]
    """

    def __init__(self, total: int) -> None:
        self.total, self.stride = total, 1
        self.packed: dict[int, np.ndarray] = {}
        self.last: np.ndarray | None = None

    def add(self, epoch: int, bits: Tensor) -> float | None:
        """Add an epoch's mask; returns its IoU with the one before, None if either is empty."""
        found = None if self.last is None else _iou(self._unpacked(self.last), bits.numpy())
        self.last = np.packbits(bits.numpy())
        if epoch % self.stride == 0:
            self.packed[epoch] = self.last
        if len(self.packed) > MOST:
            self.stride *= 2
            self.packed = {e: p for e, p in self.packed.items() if e % self.stride == 0}
        return found

    def pairs(self, seed: int) -> list[list[float]]:
        """[count, count, IoU] for up to 200 random pairs of the stored masks."""
        stored = [self._unpacked(self.packed[epoch]) for epoch in sorted(self.packed)]
        every = [(a, b) for i, a in enumerate(stored) for b in stored[i + 1 :]]
        generator = np.random.Generator(np.random.Philox(seed))
        chosen = [every[i] for i in sorted(generator.permutation(len(every))[:PAIRS])]
        found = [(int(a.sum()), int(b.sum()), _iou(a, b)) for a, b in chosen]
        return [[a, b, iou] for a, b, iou in found if iou is not None]

    def state(self) -> dict[str, Tensor]:
        """The stored masks as tensors by name, and the last one."""
        stored: dict[Any, Any] = {**self.packed, "last": self.last}
        return {f"{PREFIX}{e}": torch.tensor(p) for e, p in stored.items() if p is not None}

    def load(self, tensors: dict[str, Tensor], epochs: int) -> None:
        """Restore what `state` returned after so many epochs."""
        found = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}
        self.last = found.pop("last").numpy()
        self.packed = {int(epoch): t.numpy() for epoch, t in found.items()}
        while -(-epochs // self.stride) > MOST:
            self.stride *= 2

    def _unpacked(self, packed: np.ndarray) -> np.ndarray:
        return np.unpackbits(packed, count=self.total).astype(bool)


def _iou(a: np.ndarray, b: np.ndarray) -> float | None:
    smaller = min(int(a.sum()), int(b.sum()))
    return int((a & b).sum()) / smaller if smaller else None
