"""Returns: which removed ReLUs a net gets back, those of largest first-order gain first.

The gain is E t, by which the loss falls, with its sign: E|t|, which ranks removals, is as large for
a ReLU that raises the loss.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastbcd.descent.goals import Goal
from fastbcd.descent.limits import Limits
from fastbcd.descent.proposals import ranking
from fastbcd.descent.saliency import gains
from fastbcd.masking.masks import masks
from fastbcd.scoring.metric import Loss


def to_return(
    net: nn.Module, data: Any, limits: Limits, *, loss: Loss | None = None,
    among: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The ids of the removed ReLUs to return, LongTensor: as many as the limits allow.

    Only those of sites that keep a ReLU: another site would cost its rounds. The gains are computed
    only if a ReLU can return. among: the bits of those that may; None: all.

    >>> from fastbcd.descent.budget import limits_of
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> fastbcd.set_masks(net, fastbcd.masks(net).without([0, 2, 3]))
    >>> len(to_return(net, data, limits_of(5, net)))
    2
    """
    goal = Goal(masks(net).copy(), limits, limits)
    free = ~goal.masks.bits if among is None else among & ~goal.masks.bits
    ids = free.nonzero().flatten()
    if not limits.met(goal.counts) or not len(goal.back(ids)):
        return ids[:0]
    order = by_gain(net, data, loss=loss)
    return goal.back(order[free[order]])


def by_gain(net: nn.Module, data: Any, *, loss: Loss | None = None) -> Tensor:
    """The removed ids, LongTensor, from the largest gain to the smallest; equal ones by id."""
    return ranking(-gains(net, data, loss=loss), ~masks(net).bits)
