"""Goal: what the hypotheses of one step must reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastbcd.descent.limits import Limits, counts_of
from fastbcd.masking.masks import MaskSet

ORDER = 4  # a stream of random numbers, see STREAM in proposals.py


@dataclass(frozen=True)
class Goal:
    """The masks before a step, the limits that it must meet, and those of the end of the run."""

    masks: MaskSet
    limits: Limits
    final: Limits

    @cached_property
    def counts(self) -> np.ndarray:
        """The ReLUs that each site keeps, [sites]."""
        return counts_of(self.masks)

    @cached_property
    def size(self) -> int:
        """How many single ReLUs a hypothesis must remove, unless it empties a site."""
        return self.limits.size(self.counts)

    def sites(self, ids: Tensor) -> np.ndarray:
        """The number of the site of each id."""
        starts = [site.start for site in self.masks.sites]
        return np.searchsorted(starts, ids.numpy(), side="right") - 1

    def at_most(self, other: Goal) -> Goal:
        """The goal that saves as much as `other` did, if that is more, within the end's limit."""
        value = min(self.limits.bounds[0].most, self.limits.value(other.counts))
        value = max(value, self.final.bounds[0].most)
        return replace(self, limits=self.limits.at_most(value))

    def emptied(self, wanted: np.ndarray, others: np.ndarray) -> list[int]:
        """The sites to empty: of `wanted` until the goal is met, then of `others` if it demands it.

        The last site in use stays: single ReLUs are removed there.
        """
        counts, chosen, most = self.counts.copy(), list[int](), self.limits.most_sites()
        for place, x in enumerate([*wanted, *others]):
            used = int((counts > 0).sum())
            if self.limits.met(counts) or used == 1:
                break
            if counts[x] and (place < len(wanted) or used > most):
                chosen.append(int(x))
                counts[x] = 0
        return chosen

    def without(self, sites: Any) -> tuple[Tensor, Goal]:
        """The kept ids of these sites, and the goal that is left once they are removed."""
        kept = self.masks.bits.nonzero().flatten()
        ids = kept[torch.from_numpy(np.isin(self.sites(kept), sites))]
        return ids, replace(self, masks=self.masks.without(ids))

    def fit(self, ids: Tensor, rest: Callable[[], Tensor]) -> Tensor:
        """Those of `ids`, the first ones first, that must go; if all are too few, of `rest` too."""
        gone, met = self._fit(ids)
        return gone if met else self._fit(torch.cat([ids, rest()]))[0]

    def back(self, ids: Tensor) -> Tensor:
        """Those of the removed `ids`, the first ones first, that can return within the limits."""
        return ids[torch.from_numpy(self.limits.back(self.counts, self.sites(ids)))].sort().values

    def _fit(self, ids: Tensor) -> tuple[Tensor, bool]:
        where = self.sites(ids)
        gone = self.limits.fit(self.counts, where)
        left = self.counts - np.bincount(where[gone], minlength=len(self.counts))
        return ids[torch.from_numpy(gone)].sort().values, bool(self.limits.met(left))


def shuffled(ids: Tensor, *, seed: int, step: int, trial: int) -> Tensor:
    """The ids in a random order that is a pure function of the other arguments and their number."""
    stream = np.random.Philox(key=[ORDER, seed], counter=[0, trial, 0, step])
    return ids[torch.from_numpy(np.argsort(stream.random_raw(len(ids)), kind="stable"))]
