"""Limits: what a mask may keep at most, in ReLUs, in sites that keep any, and in cost.

Every limit is a bound on a number that follows from four totals: ReLUs, squares, sites that keep
any ReLU and sites that have any square. Masks are seen as the number of ReLUs that each site
keeps, an int array [..., sites].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fastbcd.masking.masks import MaskSet

ROUNDING = 1e-7  # of what a step saves: less than a ReLU's part of it


class Totals(NamedTuple):
    """Numbers, or arrays of one shape."""

    relus: Any
    squares: Any
    relu_sites: Any
    square_sites: Any


class Bound(NamedTuple):
    """`measure` of a mask's totals is at most `most`."""

    name: str  # "relus", "sites", or the quantity of a Target
    measure: Callable[[Totals], Any]
    most: float

    def prices(self) -> Totals:
        """What one of each adds; 0 for squares whose value is unknown, which no site has then."""
        nothing, *alone = (self.measure(Totals(*r)) for r in np.eye(5, 4, k=-1, dtype=int))
        return Totals(*(0.0 if value is None else value - nothing for value in alone))


def relus(most: float) -> Bound:
    """At most so many ReLUs."""
    return Bound("relus", lambda totals: totals.relus, most)


def sites(most: float) -> Bound:
    """At most so many sites that keep any ReLU."""
    return Bound("sites", lambda totals: totals.relu_sites, most)


def counts_of(masks: MaskSet) -> np.ndarray:
    """The ReLUs that each site keeps, int64 [sites]."""
    return np.array(list(masks.counts().values()), dtype=np.int64)


@dataclass(frozen=True)
class Limits:
    """Bounds for the masks of one net; the first is the budget's own.

    >>> limits = Limits(np.array([8, 4]), np.array([False, False]), (relus(5), sites(1)))
    >>> limits.met(np.array([[5, 0], [4, 1], [6, 0]]))
    array([ True, False, False])
    """

    units: np.ndarray  # neurons of each site, [sites]
    poly: np.ndarray  # whether its removed ReLUs are squares, bool [sites]
    bounds: tuple[Bound, ...]

    def totals(self, counts: np.ndarray) -> Totals:
        """The totals of masks, each [...]."""
        squares = np.where(self.poly, self.units - counts, 0)
        found = (counts, squares, counts > 0, squares > 0)
        return Totals(*(values.sum(-1) for values in found))

    def hold(self, totals: Totals) -> np.ndarray:
        """Whether totals are within all bounds, bool [...]."""
        totals = Totals(*np.broadcast_arrays(*totals))
        return np.logical_and.reduce([b.measure(totals) <= b.most for b in self.bounds])

    def met(self, counts: np.ndarray) -> np.ndarray:
        """Whether masks are within all bounds, bool [...]."""
        return self.hold(self.totals(counts))

    def value(self, counts: np.ndarray) -> float:
        """What the first bound measures."""
        return float(self.bounds[0].measure(self.totals(counts)))

    def most_sites(self) -> float:
        """The bound on the sites in use."""
        return min((b.most for b in self.bounds if b.name == "sites"), default=math.inf)

    def least(self) -> float:
        """The value of a mask that keeps nothing."""
        return self.value(np.zeros_like(self.units))

    def savings(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By how much one ReLU less, and emptying the site besides, lowers the value: [sites] each.

        Emptying a site of n ReLUs saves n times the first number plus the second.
        """
        price = self.bounds[0].prices()
        new = self.poly & (counts == self.units)  # it has no square yet
        return price.relus - price.squares * self.poly, price.relu_sites - price.square_sites * new

    def step(self, counts: np.ndarray, size: int, begin: tuple[float, int]) -> Limits:
        """The limits of a step that removes `size` ReLUs, or their share of the value.

        begin: the value and the number of sites in use at the start of the run. The bound on sites
        falls evenly with the logarithm of the value. A run that begins with the value of its end
        empties one site per step.
        """
        first, least, value, count = self.bounds[0], self.least(), self.value(counts), counts.sum()
        saved = size / max(count, 1) * (value - least) * (1 - ROUNDING)
        goal = max(first.most, value - saved)
        used = int((counts > 0).sum())

        def bound(b: Bound) -> Bound:
            if b.name == "relus":
                return b._replace(most=max(b.most, count - size))
            if used <= b.most:
                return b
            allowed = used - 1
            if begin[0] > first.most:
                low = 1e-3 * (begin[0] - least) - least
                now, start = (math.log((v + low) / (first.most + low)) for v in (goal, begin[0]))
                allowed = round(b.most + (begin[1] - b.most) * now / start)
            return b._replace(most=max(b.most, min(allowed, used)))

        return self.at_most(goal, tuple(map(bound, self.bounds[1:])))

    def at_most(self, value: float, others: tuple[Bound, ...] | None = None) -> Limits:
        """The same with another first bound."""
        first = self.bounds[0]._replace(most=value)
        return replace(self, bounds=(first, *(self.bounds[1:] if others is None else others)))

    def size(self, counts: np.ndarray) -> int:
        """How many ReLUs, whichever they are, must go to meet the limits, if no site is emptied.

        All of them where single ReLUs save nothing.
        """
        totals, used, count = self.totals(counts), counts > 0, int(counts.sum())
        opened = int((used & self.poly & (counts == self.units)).sum())  # sites with new squares
        most = 0
        for b in self.bounds:
            price = b.prices()
            single = price.relus - price.squares * bool((used & self.poly).any())
            excess = b.measure(totals) - b.most
            if excess > 0:
                excess += opened * price.square_sites
                most = max(most, math.ceil(excess / single - 1e-9) if single > 0 else count)
        return min(most, count)

    def fit(self, counts: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Which ReLUs to remove, of those at the sites `where`, the first ones first; bool [n].

        The fewest first ones that meet these limits. If a site was emptied, the last ones of other
        sites are kept as far as these limits allow.
        """
        met = self.hold(self._after(counts, where))
        gone = np.arange(len(where)) < (met.argmax() if met.any() else len(where))
        rest, last = _left(counts, where[gone]), np.flatnonzero(gone)[::-1]
        gone[last[self.back(rest, where[last])]] = False
        return gone

    def back(self, counts: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Which removed ReLUs to return, of those at the sites `where`, the first ones first.

        bool [n]: as many as these limits allow, in sites that keep any. Where a ReLU exceeds them,
        those of other sites may not, because its square costs more or was the site's last one.
        """
        returned, one = np.zeros(len(where), dtype=bool), np.eye(len(counts), dtype=int)
        while True:
            fits = (counts > 0) & self.met(counts + one)
            left = np.flatnonzero(~returned & fits[where])
            if not len(left):
                return returned
            # After returning all of them but the last n, …, 1, 0: removals in the opposite order.
            every = counts + np.bincount(where[left], minlength=len(counts))
            met = self.hold(self._after(every, where[left[::-1]]))[::-1]
            left = left[: len(left) if met.all() else int(met.argmin()) - 1]
            returned[left] = True
            counts = counts + np.bincount(where[left], minlength=len(counts))

    def room(self, counts: np.ndarray) -> int:
        """How many ReLUs these limits leave if they are removed in a random order."""
        where = np.repeat(np.arange(len(counts)), counts)
        order = np.argsort(np.random.Philox(0).random_raw(len(where)), kind="stable")
        return len(where) - int(self.fit(counts, where[order]).sum())

    def _after(self, counts: np.ndarray, where: np.ndarray) -> Totals:
        """The totals after removing none, the first, the first two, … of the ReLUs at `where`."""
        order = np.argsort(where, kind="stable")
        begin = np.searchsorted(where[order], np.arange(len(counts)))
        number = np.empty_like(order)  # of a ReLU among those of its site
        number[order] = np.arange(len(where)) - begin[where[order]]
        poly, t = self.poly[where], self.totals(counts)
        emptied = number + 1 == counts[where]
        opened = poly & (number == 0) & (counts == self.units)[where]  # the site's first square
        changes = (-np.ones(len(where), dtype=int), poly, -emptied.astype(int), opened)
        steps = (np.cumsum(np.append(0, change.astype(int))) for change in changes)
        return Totals(*(total + step for total, step in zip(t, steps, strict=True)))


def _left(counts: np.ndarray, where: np.ndarray) -> np.ndarray:
    """The counts without one ReLU at each of the sites `where`."""
    return counts - np.bincount(where, minlength=len(counts))
