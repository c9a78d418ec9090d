"""How much the masks of a mask training have in common: the paper's IoU over its epochs.

Masks of up to 64 epochs are stored, evenly spread: when there are more, every second one is
dropped, and from then on only every second one is added.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastbcd.masking.masks import MaskSet, Site

MOST = 64
PAIRS = 200
PREFIX = "bits."


class Overlaps:
    """Masks by epoch, packed to one bit per unit.

    >>> seen = Overlaps(fastbcd.MaskSet.full({"act": (4,)}).sites)
    >>> seen.add(0, torch.tensor([True, True, True, False]))
    >>> seen.add(1, torch.tensor([True, False, False, True]))
    0.5
    >>> seen.pairs(seed=0)
    [[3, 2, 0.5]]
    """

    def __init__(self, sites: tuple[Site, ...]) -> None:
        self.sites = sites
        self.packed: dict[int, np.ndarray] = {}
        self.stride = 1
        self.last: Tensor | None = None

    def add(self, epoch: int, bits: Tensor) -> float | None:
        """Add an epoch's mask; returns its IoU with the one before, None if either is empty."""
        found = None if self.last is None else self._iou(self.last, bits)
        self.last = bits
        if epoch % self.stride == 0:
            self.packed[epoch] = np.packbits(bits.numpy())
        if len(self.packed) > MOST:
            self.stride *= 2
            self.packed = {e: p for e, p in self.packed.items() if e % self.stride == 0}
        return found

    def pairs(self, seed: int) -> list[list[float]]:
        """[count, count, IoU] for up to 200 random pairs of the stored masks."""
        stored = [self._unpacked(self.packed[epoch]) for epoch in sorted(self.packed)]
        every = [(a, b) for i, a in enumerate(stored) for b in stored[i + 1 :]]
        generator = np.random.Generator(np.random.Philox(seed))
        found = []
        for i in sorted(generator.permutation(len(every))[:PAIRS]):
            first, second = every[i]
            if (iou := self._iou(first, second)) is not None:
                found.append([int(first.sum()), int(second.sum()), iou])
        return found

    def state(self) -> dict[str, Tensor]:
        """The stored masks as tensors by name, and the last one."""
        tensors = {f"{PREFIX}{e}": torch.from_numpy(p) for e, p in self.packed.items()}
        if self.last is not None:
            tensors[f"{PREFIX}last"] = torch.from_numpy(np.packbits(self.last.numpy()))
        return tensors

    def load(self, tensors: dict[str, Tensor], epochs: int) -> None:
        """Restore what `state` returned after so many epochs."""
        found = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}
        self.last = self._unpacked(found.pop("last").numpy())
        self.packed = {int(epoch): t.numpy() for epoch, t in found.items()}
        while -(-epochs // self.stride) > MOST:
            self.stride *= 2

    def _unpacked(self, packed: np.ndarray) -> Tensor:
        total = sum(s.numel for s in self.sites)
        return torch.from_numpy(np.unpackbits(packed, count=total).astype(bool))

    def _iou(self, a: Tensor, b: Tensor) -> float | None:
        if not a.any() or not b.any():
            return None
        return MaskSet(self.sites, a).iou(MaskSet(self.sites, b))
