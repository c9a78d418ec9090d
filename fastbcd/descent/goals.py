"""Goal: what the hypotheses of one step must reach, and which removed ReLUs may return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastbcd.descent.budget import Limits, counts_of
from fastbcd.descent.saliency import gains, ranking
from fastbcd.masking.masks import MaskSet, masks
from fastbcd.scoring.metric import Loss

# Which of the ReLUs at some sites, of masks with so many ReLUs at each site: bool [n].
Selection = Callable[[np.ndarray, np.ndarray], np.ndarray]


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

    @property
    def saving(self) -> float:
        """By how much the step must lower what the budget bounds."""
        return self.limits.value(self.counts) - self.limits.most

    def sites(self, ids: Tensor) -> np.ndarray:
        """The number of the site of each id."""
        starts = [site.start for site in self.masks.sites]
        return np.searchsorted(starts, ids.numpy(), side="right") - 1

    def at_most(self, other: Goal) -> Goal:
        """The goal that saves as much as `other` did, if that is more, within the end's limit."""
        value = min(self.limits.most, self.limits.value(other.counts))
        return replace(self, limits=self.limits.at_most(max(value, self.final.most)))

    def emptied(self, wanted: Iterable[int], others: Iterable[int]) -> list[int]:
        """The sites to empty: of `wanted` until the goal is met, then of `others` if it demands it.

        The last site in use stays: single ReLUs are removed there.
        """
        counts = self.counts.copy()
        chosen: list[int] = []
        for candidates, most in ((wanted, 1.0), (others, self.limits.most_sites())):
            for site in candidates:
                used = (counts > 0).sum()
                if used <= max(most, 1) or self.limits.met(counts):
                    break
                if counts[site]:
                    chosen.append(int(site))
                    counts[site] = 0
        return chosen

    def without(self, sites: Any) -> tuple[Tensor, Goal]:
        """The kept ids of these sites, and the goal that is left once they are removed."""
        kept = self.masks.bits.nonzero().flatten()
        ids = kept[torch.from_numpy(np.isin(self.sites(kept), sites))]
        return ids, replace(self, masks=self.masks.without(ids))

    def fit(self, ids: Tensor, others: Tensor) -> Tensor:
        """Those of the kept `ids`, the first ones first, that must go.

        If all of them are too few, those of `others` that must go as well.
        """
        gone = self._chosen(self.limits.fit, ids)
        if self.limits.met(counts_of(self.masks.without(gone))):
            return gone
        more = torch.cat([ids, others[~torch.isin(others, ids)]])
        return self._chosen(self.limits.fit, more)

    def back(self, ids: Tensor) -> Tensor:
        """Those of the removed `ids`, the first ones first, that can return within the limits."""
        return self._chosen(self.limits.back, ids)

    def _chosen(self, select: Selection, ids: Tensor) -> Tensor:
        chosen = select(self.counts, self.sites(ids))
        return ids[torch.from_numpy(chosen)].sort().values


def to_return(
    net: nn.Module,
    data: Any,
    limits: Limits,
    *,
    loss: Loss | None = None,
    among: Tensor | None = None,
) -> Tensor:
    """The ids of the removed ReLUs to return, LongTensor: as many as the limits allow.

    Those of largest first-order gain come first, and only those of sites that keep a ReLU: another
    site would cost its rounds. The gain is E t, by which the loss falls, with its sign: E|t|, which
    ranks removals, is as large for a ReLU that raises the loss. It is computed only if a ReLU can
    return. among: the bits of those that may; None: all.

    >>> from fastbcd.descent.budget import limits_of
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> fastbcd.set_masks(net, fastbcd.masks(net).without([0, 2, 3]))
    >>> len(to_return(net, data, limits_of(5, net)))
    2
    """
    goal = Goal(masks(net).copy(), limits, limits)
    free = ~goal.masks.bits
    if among is not None:
        free &= among
    ids = free.nonzero().flatten()
    if not limits.met(goal.counts) or not len(goal.back(ids)):
        return ids[:0]
    return goal.back(ranking(-gains(net, data, loss=loss), free))
