"""Accounting: what to remove for the least loss per second saved, a site's rounds included.

At a price λ, the loss that a saved second is worth, it pays to remove a set P of ReLUs if
loss(P) <= λ · saved(P), where loss(P) is the sum of its saliencies. A ReLU p of site x alone saves
price_x. All kept ReLUs of a site together save bonus_x, the site's rounds, in addition. So p pays
from λ = loss_p / price_x on, and emptying the site, after its cheaper ReLUs are gone, from

    break-even_x  =  max over j of  (Σ_{i >= j} loss_i) / (bonus_x + (n - j) · price_x)

on, with loss_0 <= … <= loss_{n-1} the losses of the site. What pays at λ loses least among all sets
that save as much. "Seconds" stands for whatever is saved: bytes, rounds or ReLUs, too.
"""

from __future__ import annotations

import numpy as np


def break_even(
    loss: np.ndarray, where: np.ndarray, price: np.ndarray, bonus: np.ndarray
) -> np.ndarray:
    """The price from which on emptying each site pays, [sites]; inf: never.

    loss [n] and the site `where` [n] of each kept ReLU; price and bonus [sites].

    >>> break_even(np.array([1.0, 3.0]), np.array([0, 0]), np.array([1.0]), np.array([2.0]))
    array([1.])
    """
    found = np.full(len(price), np.inf)
    for x in np.unique(where):
        rest = np.cumsum(np.sort(loss[where == x])[::-1])  # of the largest, the two largest, …
        saved = bonus[x] + price[x] * np.arange(1, len(rest) + 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            found[x] = np.where(saved > 0, rest / saved, np.inf).max()
    return found


def price_of(
    saving: float, loss: np.ndarray, where: np.ndarray, price: np.ndarray, bonus: np.ndarray
) -> float:
    """The smallest λ at which what pays saves at least `saving`; the largest useful one if none."""
    site = break_even(loss, where, price, bonus)
    with np.errstate(divide="ignore", invalid="ignore"):
        alone = np.where(price[where] > 0, loss / price[where], np.inf)
    at = np.append(np.minimum(alone, site[where]), site)  # where each ReLU, and each bonus, pays
    saved, useful = np.append(price[where], bonus), np.isfinite(at)
    if not useful.any():
        return 0.0
    at, saved = at[useful], saved[useful]
    order = np.argsort(at, kind="stable")
    enough = np.searchsorted(np.cumsum(saved[order]), saving * (1 - 1e-9))
    return float(at[order][min(int(enough), len(at) - 1)])


def loss_beyond(
    worth: float, loss: np.ndarray, where: np.ndarray, price: np.ndarray, bonus: np.ndarray
) -> np.ndarray:
    """The loss of emptying each site beyond what it saves at the price `worth`, [sites].

    Σ max(loss - worth · price, 0) - worth · bonus: it pays where that is not above 0.
    """
    more = np.maximum(loss - worth * price[where], 0.0)
    return np.bincount(where, weights=more, minlength=len(price)) - worth * bonus
