"""Proposals: which kept ReLUs a hypothesis would remove.

    fastbcd.bcd(net, data, budget, proposal="saliency")
    fastbcd.bcd(net, data, budget, proposal=fastbcd.Saliency(temperature=0.5))

A proposal is made once a step and then gives hypothesis `trial` as a pure function, so that
hypotheses do not depend on how they are batched, on ranks or on an interruption.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.descent.saliency import check_kind, saliency
from fastbcd.masking.masks import masks

Draw = Callable[[int], Tensor]  # trial -> LongTensor[size] of kept ids, no repeats
Proposal = Callable[[nn.Module, ImageData, int, int, int], Draw]  # net, data, size, seed, step

STREAM = 3  # of random numbers; 0 is the uniform hypotheses', 1 and 2 the images'
DIGITS = 20  # bits of a score that count


def uniform(net: nn.Module, data: ImageData, size: int, seed: int, step: int) -> Draw:
    """The paper's: `size` kept ReLUs, uniform over all such sets.

    >>> net = nn.Sequential(nn.Linear(4, 3), fastbcd.MaskedReLU((3,)))
    >>> uniform(net, None, 3, seed=0, step=1)(0).sort().values
    tensor([0, 1, 2])
    """
    current = masks(net).copy()
    return lambda trial: current.sample(size, seed=seed, step=step, trial=trial)


@dataclass(frozen=True)
class Saliency:
    """ReLUs whose removal costs little to first order; exact scoring decides among hypotheses.

    Hypothesis 0 takes the `size` ReLUs of smallest saliency. The others draw `size` without
    replacement, one after the other, the ReLU of rank r (0: the smallest) with a chance
    proportional to exp(-r / (temperature * size)). So the temperature says how blurred the edge
    of a hypothesis is, in units of its size: 0 is greedy (one hypothesis, whatever RT), infinity
    is uniform. kind is that of `fastbcd.saliency`.

    >>> Saliency(temperature=0.5)
    Saliency(temperature=0.5, kind='mean_abs')
    """

    temperature: float = 0.25
    kind: str = "mean_abs"

    def __post_init__(self) -> None:
        check_kind(self.kind)
        t = self.temperature
        if isinstance(t, bool) or not isinstance(t, int | float):
            raise TypeError(f"temperature={t!r}; it must be a number, 0 (greedy) or more")
        if not t >= 0:
            raise ValueError(f"temperature={t}; it must be 0 (greedy) or more")

    def __call__(
        self, net: nn.Module, data: ImageData, size: int, seed: int, step: int
    ) -> Draw:  # fmt: skip
        """The draw of a step; the saliency is taken on `data`, once."""
        order = ranking(saliency(net, data, kind=self.kind), masks(net).bits)
        width = self.temperature * size
        return lambda trial: favouring(order, size, width, seed=seed, step=step, trial=trial)


def ranking(scores: Tensor, kept: Tensor) -> Tensor:
    """The kept ids from the smallest score to the largest, LongTensor.

    Scores count to 20 bits, one part in a million, and equal ones are ranked by id: the rounding
    that another number of threads or ranks brings then seldom changes the order. (It may, where
    a score lies at the edge between two steps of the grid. Two runs compare equal on one machine.)

    >>> scores = torch.tensor([2.0, 1.0, 1.0 - 1e-9, 0.0, 0.5], dtype=torch.float64)
    >>> ranking(scores, torch.tensor([True, True, True, True, False]))
    tensor([3, 1, 2, 0])
    """
    ids = kept.nonzero().flatten()
    mantissa, exponent = np.frexp(scores[ids].numpy())
    rounded = np.ldexp(np.rint(np.ldexp(mantissa, DIGITS)), exponent)
    return ids[torch.from_numpy(np.argsort(rounded, kind="stable"))]


def favouring(
    order: Tensor, size: int, width: float, *, seed: int, step: int, trial: int
) -> Tensor:  # fmt: skip
    """`size` of the ids in `order`, ascending: without replacement, chances exp(-rank/width).

    A pure function of its arguments. Trial 0 takes the first ones, and so does every trial with
    width 0.

    >>> favouring(torch.arange(9), 3, 1.5, seed=0, step=1, trial=0)
    tensor([0, 1, 2])
    """
    if not 0 <= size <= len(order):
        raise ValueError(f"cannot draw {size} ReLUs: {len(order)} are kept")
    if trial == 0 or width == 0:
        return order[:size].sort().values
    # Counter-based and raw, as in masking.py: (seed; step, trial) names the stream.
    generator = np.random.Philox(
        key=np.array([STREAM, seed], np.uint64), counter=np.array([0, 0, trial, step], np.uint64)
    )
    u = ((generator.random_raw(len(order)) >> np.uint64(11)) + 0.5) * 2.0**-53
    # The `size` largest of log(chance) - log(-log u) are such a draw (Gumbel's top-k).
    with np.errstate(over="ignore"):  # infinite for a tiny width: in order, which is its limit
        keys = np.log(-np.log(u)) + np.arange(len(order)) / width
    chosen = np.argsort(keys, kind="stable")[:size]
    return order[torch.from_numpy(chosen)].sort().values


PROPOSALS: dict[str, Proposal] = {"uniform": uniform, "saliency": Saliency()}


def find(proposal: str | Saliency) -> Proposal:
    """The proposal of this name, or that one itself."""
    if isinstance(proposal, Saliency):
        return proposal
    if proposal not in PROPOSALS:
        names = ", ".join(PROPOSALS)
        raise ValueError(f"proposal={proposal!r}; choose from {names}, or give Saliency(...)")
    return PROPOSALS[proposal]


def is_greedy(proposal: str | Saliency) -> bool:
    """Are all hypotheses of a step the same?"""
    found = find(proposal)
    return isinstance(found, Saliency) and found.temperature == 0


def describe(proposal: str | Saliency) -> Any:
    """The proposal, for config.json.

    >>> describe("saliency") == describe(Saliency())
    True
    """
    found = find(proposal)
    if not isinstance(found, Saliency):
        return proposal
    # JSON has no infinity.
    temperature = "inf" if math.isinf(found.temperature) else float(found.temperature)
    return {"name": "saliency", **dataclasses.asdict(found), "temperature": temperature}
