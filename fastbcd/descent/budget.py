"""Budgets: what a run may keep at the end, and how it becomes limits of one net's masks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from torch import nn

from fastbcd.descent.limits import Bound, Limits, counts_of, relus, sites
from fastbcd.masking.activations import MaskedPoly
from fastbcd.masking.masks import mask_modules, masks
from fastbcd.runtime.validate import check_whole


class Budget(ABC):
    """What `budget=` takes beside a number of ReLUs: a cost, such as `private.Target`."""

    @abstractmethod
    def bounds(self, units: np.ndarray, poly: np.ndarray) -> tuple[Bound, ...]:
        """The bounds for a net whose sites have so many neurons, and quadratics where `poly`."""

    @abstractmethod
    def describe(self) -> Any:
        """What config.json records."""


def limits_of(budget: int | Budget, net: nn.Module, max_sites: int | None = None) -> Limits:
    """A budget and `max_sites` as limits of this net's masks; refuses what no mask can meet."""
    modules = mask_modules(net).values()
    units = np.array([module.mask.numel() for module in modules], dtype=np.int64)
    poly = np.array([isinstance(module, MaskedPoly) for module in modules])
    if isinstance(budget, Budget):
        bounds = budget.bounds(units, poly)
    else:
        check_whole("budget", budget, 0)
        bounds = (relus(budget),)
    if max_sites is None:
        return Limits(units, poly, bounds)
    check_whole("max_sites", max_sites, 0)
    limits = Limits(units, poly, (*bounds, sites(max_sites)))
    if not isinstance(budget, Budget):
        _check_room(budget, max_sites, limits, counts_of(masks(net)))
    return limits


def check_reducible(budget: int | Budget, net: nn.Module) -> None:
    """Refuse a number of ReLUs that is larger than the net's."""
    kept = masks(net).count()
    if not isinstance(budget, Budget) and budget > kept:
        raise ValueError(f"budget={budget:,}; the net keeps {kept:,} ReLUs: at most that many")


def shown(budget: int | Budget) -> str:
    """A budget as text."""
    if isinstance(budget, Budget):
        return str(budget)
    return f"{budget:,}"


def _check_room(budget: int, max_sites: int, limits: Limits, counts: np.ndarray) -> None:
    """Refuse a number of ReLUs that so many sites do not have."""
    room = int(np.sort(counts)[::-1][:max_sites].sum())
    if budget > room and not limits.met(counts):
        raise ValueError(
            f"budget={budget:,}; the {max_sites} largest sites (max_sites) keep {room:,} ReLUs: "
            f"give at most that budget, or a larger max_sites"
        )
