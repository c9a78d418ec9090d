"""Blocks: hypotheses of single ReLUs and whole sites, for budgets in seconds, bytes or sites.

What to remove for the least loss per second saved, a site's rounds included? At a price λ, the
loss that a saved second is worth, it pays to remove a set P of ReLUs if loss(P) <= λ · saved(P),
where loss(P) is the sum of its saliencies. A ReLU p of site x alone saves price_x. All kept ReLUs
of a site together save bonus_x, the site's rounds, in addition. So p pays from
λ = loss_p / price_x on, and emptying the site, after its cheaper ReLUs are gone, from

    break-even_x  =  max over j of  (Σ_{i >= j} loss_i) / (bonus_x + (n - j) · price_x)

on, with loss_0 <= … <= loss_{n-1} the losses of the site. What pays at λ loses least among all sets
that save as much. "Seconds" stands for whatever is saved: bytes, rounds or ReLUs, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.descent.families import together
from fastbcd.descent.goals import Goal
from fastbcd.descent.proposals import Draw, Proposal, Saliency, Uniform, favouring
from fastbcd.descent.saliency import rounded
from fastbcd.runtime.philox import SITES, philox, uniform

# How many sites more than hypothesis 0 the others empty, in turn, of those that pay at 10 times
# the price.
MORE = (0, -1, 1, 2)
NEAR = 10.0
ROUNDING = 1e-9


@dataclass(frozen=True)
class Account:
    """What the removal of each kept ReLU loses and saves.

    >>> loss = np.array([1.0, 3.0])
    >>> account = Account(loss, np.array([0, 0]), price=np.array([1.0]), bonus=np.array([2.0]))
    >>> account.pays, account.worth(3.0)
    (array([1.]), 1.0)
    """

    loss: np.ndarray  # of each ReLU, [n]
    where: np.ndarray  # its site, [n]
    price: np.ndarray  # what one ReLU saves, [sites]
    bonus: np.ndarray  # what emptying the site saves besides, [sites]

    @cached_property
    def alone(self) -> np.ndarray:
        """The price from which on removing each ReLU pays, [n]; inf: never."""
        return _ratio(self.loss, self.price[self.where])

    @cached_property
    def pays(self) -> np.ndarray:
        """The price from which on emptying each site pays, [sites]; inf: never."""
        pays = np.full(len(self.price), np.inf)
        for site in np.unique(self.where):
            largest_first = np.sort(self.loss[self.where == site])[::-1]
            lost = np.cumsum(largest_first)
            saved = self.bonus[site] + self.price[site] * np.arange(1, len(lost) + 1)
            pays[site] = _ratio(lost, saved).max()
        return pays

    def worth(self, saving: float) -> float:
        """The smallest price at which what pays saves at least `saving`; else the largest."""
        from_price = np.append(np.minimum(self.alone, self.pays[self.where]), self.pays)
        saved = np.append(self.price[self.where], self.bonus)
        order = np.argsort(from_price, kind="stable")
        order = order[np.isfinite(from_price[order])]
        if not len(order):
            return 0.0
        enough = np.searchsorted(np.cumsum(saved[order]), saving * (1 - ROUNDING))
        return float(from_price[order[min(int(enough), len(order) - 1)]])

    def beyond(self, worth: float, factor: np.ndarray) -> np.ndarray:
        """The loss of emptying each site beyond what it saves at the price `worth`, [sites].

        Σ max(loss - worth · price, 0) - worth · bonus: it pays where that is not above 0.
        factor: of the losses of each site.
        """
        loss = self.loss * factor[self.where]
        more = np.maximum(loss - worth * self.price[self.where], 0.0)
        return np.bincount(self.where, more, len(self.price)) - worth * self.bonus

    def candidates(
        self, worth: float, near: float, factor: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The sites to empty until a goal is met, and those to empty if it demands it.

        The first are those that pay at the price `near`, the cheapest first; the others all
        sites by what they lose beyond `worth`.
        """
        if factor is None:
            factor = np.ones(len(self.price))
        pays = self.pays * factor
        cheapest_first = np.argsort(pays, kind="stable")
        wanted = (pays <= near) & (self.bonus > 0)
        others = np.argsort(self.beyond(worth, factor), kind="stable")
        return cheapest_first[wanted[cheapest_first]], others


@dataclass(frozen=True)
class Blocks(Saliency):
    """Single ReLUs or whole sites, whichever cost least loss per second saved.

    The proposal for a `private.Target` and for `max_sites`. What a step removes is valued by its
    first-order loss, the sum of `fastbcd.saliency`, and by what it saves: a ReLU its own cost, all
    ReLUs of a site also the site's rounds. Hypothesis 0 empties the sites that pay at the price per
    second at which the step reaches its goal, and removes the single ReLUs of smallest loss per
    second. Hypothesis 1 empties none of them. The others empty one or two sites more, or one fewer,
    in an order that is drawn: by the price from which on a site pays, times a random factor. They
    draw single ReLUs as `Saliency` does. All save as much as hypothesis 0, which may be more than
    the step's share if a site is emptied, but not more than the budget asks for: what a site saves
    beyond it is for the ReLUs that return after the choice. Where no site saves rounds, hypotheses
    are those of `Saliency`.

    >>> Blocks(temperature=0.5)
    Blocks(temperature=0.5, kind='mean_abs', distilled=False)
    """

    name = "blocks"

    def toward(
        self, net: nn.Module, data: ImageData, goal: Goal, *, seed: int, step: int
    ) -> Draw:
        kept = goal.masks.bits.nonzero().flatten()
        loss = rounded(self.saliency(net, data)[kept])
        account = Account(loss, goal.sites(kept), *goal.limits.savings(goal.counts))
        # As they pay; those that save nothing last, by loss.
        order = kept[torch.from_numpy(np.lexsort((account.loss, account.alone)))]
        if goal.limits.bounds[0].families:
            lost = np.bincount(account.where, account.loss, len(account.price))
            return together(goal, lost, order, seed=seed, step=step)
        return self._mixed(goal, account, order, seed=seed, step=step)

    def _mixed(
        self, goal: Goal, account: Account, order: Tensor, *, seed: int, step: int
    ) -> Draw:
        """Draws of sites and single ReLUs; order: the kept ids, as they pay."""
        worth = account.worth(goal.saving)
        paying = account.candidates(worth, worth * (1 + ROUNDING))
        first = goal.emptied(*paying)
        common = goal.at_most(goal.without(first)[1])

        def emptied(trial: int) -> list[int]:
            if trial == 0:
                return first
            if trial == 1:
                return common.emptied([], paying[1])
            number = max(0, len(first) + MORE[trial % len(MORE)])
            u = uniform(
                philox(SITES, seed=seed, step=step, trial=trial), len(goal.counts)
            )
            # The factors are 1/3 to 3 in 80 % of the draws.
            drawn = account.candidates(worth, NEAR * worth, np.sqrt(1 / u - 1))
            return common.emptied(drawn[0][:number], drawn[1])

        def draw(trial: int) -> Tensor:
            ids, left = common.without(emptied(trial))
            every = order[left.masks.bits[order]]
            width = self.temperature * left.size
            single = favouring(
                every, left.size, width, seed=seed, step=step, trial=trial
            )
            return torch.cat([ids, left.fit(single, every)])

        return draw


PROPOSALS: dict[str, Proposal] = {
    "uniform": Uniform(),
    "saliency": Saliency(),
    "blocks": Blocks(),
}


def _ratio(lost: np.ndarray, saved: np.ndarray) -> np.ndarray:
    """Loss per saving; inf where nothing is saved."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(saved > 0, lost / saved, np.inf)
