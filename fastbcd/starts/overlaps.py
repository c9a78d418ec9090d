"""How much the masks of a mask training have in common: the paper's IoU, of all its epochs.

Masks of up to 64 epochs are kept, evenly spread: when there are more, every second one goes and
from then on only every second one is added.
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
    """Masks by epoch, packed to a bit a unit.

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
        """Note an epoch's mask; its IoU with the one before, None for the first or an empty one."""
        found = None if self.last is None else self._iou(self.last, bits)
        self.last = bits
        if epoch % self.stride == 0:
            self.packed[epoch] = np.packbits(bits.numpy())
        if len(self.packed) > MOST:
            self.stride *= 2
            self.packed = {e: p for e, p in self.packed.items() if e % self.stride == 0}
        return found

    def pairs(self, seed: int) -> list[list[float]]:
        """[count, count, IoU] for up to 200 pairs of kept masks, drawn at random."""
        epochs = sorted(self.packed)
        every = [(a, b) for i, a in enumerate(epochs) for b in epochs[i + 1 :]]
        generator = np.random.Generator(np.random.Philox(seed))
        drawn = generator.permutation(len(every))[:PAIRS]
        found = []
        for a, b in (every[i] for i in sorted(drawn)):
            first, second = self._bits(a), self._bits(b)
            iou = self._iou(first, second)
            if iou is not None:
                found.append([int(first.sum()), int(second.sum()), iou])
        return found

    def state(self) -> dict[str, Tensor]:
        """The kept masks as tensors by name, and the last one."""
        kept = {f"{PREFIX}{e}": torch.from_numpy(p) for e, p in self.packed.items()}
        if self.last is not None:
            kept[f"{PREFIX}last"] = torch.from_numpy(np.packbits(self.last.numpy()))
        return kept

    def load(self, tensors: dict[str, Tensor], epochs: int) -> None:
        """Take up what `state` put down after so many epochs."""
        self.packed = {
            int(n.removeprefix(PREFIX)): t.numpy()
            for n, t in tensors.items()
            if n.startswith(PREFIX) and n != f"{PREFIX}last"
        }
        self.last = self._unpacked(tensors[f"{PREFIX}last"].numpy())
        while -(-epochs // self.stride) > MOST:
            self.stride *= 2

    def _bits(self, epoch: int) -> Tensor:
        return self._unpacked(self.packed[epoch])

    def _unpacked(self, packed: np.ndarray) -> Tensor:
        total = sum(s.numel for s in self.sites)
        return torch.from_numpy(np.unpackbits(packed, count=total).astype(bool))

    def _iou(self, a: Tensor, b: Tensor) -> float | None:
        if not a.any() or not b.any():
            return None
        return MaskSet(self.sites, a).iou(MaskSet(self.sites, b))
