"""Budgets: what a mask may keep at most, in ReLUs, in sites that keep any, and in cost.

Every limit is a bound on a number that follows from four totals: ReLUs, squares, sites that keep
any ReLU and sites that have any square. Masks are seen as the number of ReLUs that each site
keeps, an int array [..., sites].
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from fastbcd.masking.activations import MaskedLine, MaskedPoly
from fastbcd.masking.masks import MaskSet, mask_modules, masks
from fastbcd.runtime.validate import check_whole

ROUNDING = 1e-7  # of what a step saves: less than a ReLU's part of it
CHUNK = 4096  # ReLUs whose removal is looked at together: memory goes by it


class Totals(NamedTuple):
    """Numbers, or arrays of one shape."""

    relus: Any
    squares: Any
    relu_sites: Any
    square_sites: Any
    # The ReLUs of each site, [..., sites], for a cost that depends on which sites are in use.
    counts: Any = None


class Bound(NamedTuple):
    """`measure` of a mask's totals is at most `most`."""

    name: str  # "relus", "sites", or the quantity of a Target
    measure: Callable[[Totals], Any]
    most: float
    # Sites that save more if they are emptied together than one by one.
    families: tuple[tuple[int, ...], ...] = ()

    def prices(self) -> Totals:
        """What one of each adds."""
        nothing = self.measure(Totals(0, 0, 0, 0))
        return Totals(
            *(self.measure(Totals(*one)) - nothing for one in np.eye(4, dtype=int))
        )


class Budget(ABC):
    """What is to be kept: a number of ReLUs, or a cost such as `private.Target`."""

    @staticmethod
    def of(budget: int | Budget) -> Budget:
        """What `budget=` takes, checked."""
        if isinstance(budget, Budget):
            return budget
        check_whole("budget", budget, 0)
        return Count(operator.index(budget))

    @abstractmethod
    def bounds(
        self, units: np.ndarray, poly: np.ndarray, net: nn.Module | None = None
    ) -> tuple[Bound, ...]:
        """The bounds for a net whose sites have so many neurons.

        poly: where removed ReLUs become quadratics or, in a net without any, lines.
        """

    @abstractmethod
    def describe(self) -> Any:
        """What config.json records."""


@dataclass(frozen=True)
class Count(Budget):
    """A number of ReLUs."""

    most: int

    def bounds(
        self, units: np.ndarray, poly: np.ndarray, net: nn.Module | None = None
    ) -> tuple[Bound, ...]:
        return (relus(self.most),)

    def describe(self) -> int:
        return self.most

    def __str__(self) -> str:
        return f"{self.most:,}"


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

    @property
    def most(self) -> float:
        """The largest value allowed."""
        return self.bounds[0].most

    def totals(self, counts: np.ndarray) -> Totals:
        """The totals of masks, each [...]."""
        squares = np.where(self.poly, self.units - counts, 0)
        return Totals(
            relus=counts.sum(-1),
            squares=squares.sum(-1),
            relu_sites=(counts > 0).sum(-1),
            square_sites=(squares > 0).sum(-1),
            counts=counts,
        )

    def met(self, counts: np.ndarray) -> np.ndarray:
        """Whether masks are within all bounds, bool [...]."""
        totals = self.totals(counts)
        return np.logical_and.reduce([b.measure(totals) <= b.most for b in self.bounds])

    def value(self, counts: np.ndarray) -> float:
        """What the first bound measures."""
        return float(self.bounds[0].measure(self.totals(counts)))

    def least(self) -> float:
        """The value of a mask that keeps nothing."""
        return self.value(np.zeros_like(self.units))

    def most_sites(self) -> float:
        """The bound on the sites in use."""
        return min((b.most for b in self.bounds if b.name == "sites"), default=math.inf)

    def savings(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By how much one ReLU less, and emptying the site besides, lowers the value: [sites] each.

        Emptying a site of n ReLUs saves n times the first number plus the second, without what
        families save besides.
        """
        price = self.bounds[0].prices()
        new = self.poly & (counts == self.units)  # it has no square yet
        return (
            price.relus - price.squares * self.poly,
            price.relu_sites - price.square_sites * new,
        )

    def at_most(self, *most: float) -> Limits:
        """The same with other bounds, from the first one on."""
        changed = [
            bound._replace(most=new)
            for bound, new in zip(self.bounds, most, strict=False)
        ]
        return replace(self, bounds=(*changed, *self.bounds[len(most) :]))

    def step(self, counts: np.ndarray, size: int, begin: tuple[float, int]) -> Limits:
        """The limits of a step that removes `size` ReLUs, or their share of the value.

        begin: the value and the number of sites in use at the start of the run.
        """
        count = counts.sum()
        value = self.value(counts)
        saved = size / max(count, 1) * (value - self.least()) * (1 - ROUNDING)
        goal = max(self.most, value - saved)
        most = [goal]
        for bound in self.bounds[1:]:
            if bound.name == "relus":
                most.append(max(bound.most, count - size))
            else:
                most.append(
                    self._sites_at(goal, bound.most, int((counts > 0).sum()), begin)
                )
        return self.at_most(*most)

    def _sites_at(
        self, goal: float, most: float, used: int, begin: tuple[float, int]
    ) -> float:
        """The bound on sites at the value `goal`: it falls evenly with the value's logarithm.

        A run that begins with the value of its end empties one site per step.
        """
        if used <= most:
            return most
        value, sites_used = begin
        if value <= self.most:
            return max(most, used - 1)
        least = self.least()
        low = 1e-3 * (value - least) - least
        left = math.log((goal + low) / (self.most + low))
        whole = math.log((value + low) / (self.most + low))
        allowed = round(most + (sites_used - most) * left / whole)
        return max(most, min(allowed, used))

    def size(self, counts: np.ndarray) -> int:
        """How many ReLUs, whichever they are, must go to meet the limits, if no site is emptied.

        All of them where single ReLUs save nothing.
        """
        totals = self.totals(counts)
        count = int(counts.sum())
        squares = self.poly & (counts > 0)
        opened = int((squares & (counts == self.units)).sum())  # sites with new squares
        most = 0
        for bound in self.bounds:
            excess = bound.measure(totals) - bound.most
            if excess <= 0:
                continue
            price = bound.prices()
            single = price.relus - price.squares * squares.any()
            if single <= 0:
                return count
            excess += opened * price.square_sites
            most = max(most, math.ceil(excess / single - 1e-9))
        return min(most, count)

    def fit(self, counts: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Which ReLUs to remove, of those at the sites `where`, the first ones first; bool [n].

        The fewest first ones that meet these limits. If a site was emptied, the last ones of other
        sites are kept as far as these limits allow.
        """
        number = 0
        if not self.met(counts):
            number = self._first(counts, where, -1, met=True) + 1
        gone = np.arange(len(where)) < number
        left = counts - self._at(where[gone])
        last = np.flatnonzero(gone)[::-1]
        gone[last[self.back(left, where[last])]] = False
        return gone

    def back(self, counts: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Which removed ReLUs to return, of those at the sites `where`, the first ones first.

        bool [n]: as many as these limits allow, in sites that keep any. Where a ReLU exceeds them,
        those of other sites may not, because its square costs more or was the site's last one.
        """
        returned = np.zeros(len(where), dtype=bool)
        one_more = np.eye(len(counts), dtype=int)
        while True:
            fits = (counts > 0) & self.met(counts + one_more)
            left = np.flatnonzero(~returned & fits[where])
            if not len(left):
                return returned
            left = left[: self._first(counts, where[left], 1, met=False)]
            returned[left] = True
            counts = counts + self._at(where[left])

    def _first(
        self, counts: np.ndarray, where: np.ndarray, sign: int, *, met: bool
    ) -> int:
        """The first ReLU after which the limits are met, or are not; len(where) if none.

        sign: of the changes, -1 if the ReLUs at `where` are removed one after the other.
        """
        for begin in range(0, len(where), CHUNK):
            at_site = where[begin : begin + CHUNK, None] == np.arange(len(counts))
            after = counts + sign * np.cumsum(at_site, axis=0)
            hits = np.flatnonzero(self.met(after) == met)
            if len(hits):
                return begin + int(hits[0])
            counts = after[-1]
        return len(where)

    def _at(self, where: np.ndarray) -> np.ndarray:
        """How many of the ReLUs at the sites `where` each site has."""
        return np.bincount(where, minlength=len(self.units))


def relus(most: float) -> Bound:
    """At most so many ReLUs."""
    return Bound("relus", lambda totals: totals.relus, most)


def sites(most: float) -> Bound:
    """At most so many sites that keep any ReLU."""
    return Bound("sites", lambda totals: totals.relu_sites, most)


def counts_of(masks: MaskSet) -> np.ndarray:
    """The ReLUs that each site keeps, int64 [sites]."""
    return np.array(list(masks.counts().values()), dtype=np.int64)


def limits_of(
    budget: int | Budget, net: nn.Module, max_sites: int | None = None
) -> Limits:
    """A budget and `max_sites` as limits of this net's masks; refuses a cost that none can meet."""
    wanted = Budget.of(budget)
    modules = mask_modules(net).values()
    units = np.array([module.mask.numel() for module in modules], dtype=np.int64)
    poly = np.array([isinstance(module, MaskedPoly) for module in modules])
    if not poly.any():
        poly = np.array([isinstance(module, MaskedLine) for module in modules])
    bounds = wanted.bounds(units, poly, net)
    if max_sites is not None:
        bounds = (*bounds, sites(max_sites))
    return Limits(units, poly, bounds)


def check_reducible(budget: int | Budget, net: nn.Module) -> None:
    """Refuse a number of ReLUs that is larger than the net's."""
    wanted = Budget.of(budget)
    kept = masks(net).count()
    if isinstance(wanted, Count) and wanted.most > kept:
        raise ValueError(
            f"budget={wanted}; the net keeps {kept:,} ReLUs: at most that many"
        )
