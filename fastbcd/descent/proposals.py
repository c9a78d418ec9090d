"""Proposals: which kept ReLUs a hypothesis removes.

A proposal is called once per step and returns a pure function of the number of a hypothesis, so
that hypotheses do not depend on how they are batched, on ranks or on an interruption.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.descent.accounting import break_even, loss_beyond, price_of
from fastbcd.descent.goals import Goal, shuffled
from fastbcd.descent.saliency import KINDS, saliency
from fastbcd.masking.masks import masks
from fastbcd.runtime.validate import check_choice
from fastbcd.scoring.metric import Loss
from fastbcd.training.teacher import Distillation

Draw = Callable[[int], Tensor]  # trial -> LongTensor[size] of kept ids, no repeats

# Streams of random numbers; 0 is the uniform hypotheses', 1 and 2 the images', 4 an order's.
STREAM, SITES = 3, 5
# Hypotheses of Blocks: how many sites more than the first one they empty, in turn, of those that
# pay at 10 times the price.
MORE, NEAR = (0, -1, 1, 2), 10.0
DIGITS = 20  # bits of a score that are compared


class Proposal(ABC):
    """Derive from it, or write any object with the same call and `describe()`.

    The call gets the net as it is before the step, the images that score and the number of ReLUs
    to remove. It returns a function of the hypothesis's number (0, 1, …) that returns the flat
    ids of `size` kept ReLUs, each once. Use `seed` and `step` for random numbers, so that a
    resumed run draws the same hypotheses. A dataclass is described in config.json by its fields.

    If the budget is a cost, `size` is the number of ReLUs that are worth the step's saving. Where a
    hypothesis empties a site and so saves more, the last of its ids at other sites are kept.

    >>> class LastFirst(fastbcd.Proposal):
    ...     def __call__(self, net, data, size, *, seed, step):
    ...         kept = fastbcd.masks(net).bits.nonzero().flatten()
    ...         return lambda trial: kept[len(kept) - size - trial :][:size]
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> run = fastbcd.bcd(net, data, 4, drc=2, rt=1, finetune=None, proposal=LastFirst())
    >>> run.masks.bits
    tensor([ True,  True,  True,  True, False, False])
    """

    @abstractmethod
    def __call__(self, net: nn.Module, data: ImageData, size: int, *, seed: int, step: int) -> Draw:
        """The draws of one step."""

    def describe(self) -> Any:
        """What config.json records: JSON-able, and different if the draws are different."""
        fields: dict[str, Any] = {}
        if dataclasses.is_dataclass(self):
            fields = dataclasses.asdict(self)
        return {"name": type(self).__qualname__, **fields}


class Uniform(Proposal):
    """The paper's: `size` kept ReLUs, uniform over all such sets."""

    def __call__(self, net: nn.Module, data: ImageData, size: int, *, seed: int, step: int) -> Draw:
        current = masks(net).copy()

        def draw(trial: int) -> Tensor:
            ids = current.sample(size, seed=seed, step=step, trial=trial)
            return shuffled(ids, seed=seed, step=step, trial=trial)

        return draw

    def describe(self) -> str:
        return "uniform"


@dataclass(frozen=True)
class Saliency(Proposal):
    """ReLUs whose removal costs little to first order; exact scoring chooses among hypotheses.

    Hypothesis 0 takes the `size` ReLUs of smallest saliency. The others draw `size` without
    replacement, one after the other, the ReLU of rank r (0: the smallest) with a probability
    proportional to exp(-r / (temperature * size)). Temperature 0 is greedy (one hypothesis,
    whatever RT), infinity is uniform. kind is that of `fastbcd.saliency`. distilled: of the loss
    that `Finetune` minimises with the teacher, in place of the cross-entropy alone.

    >>> Saliency(temperature=0.5)
    Saliency(temperature=0.5, kind='mean_abs', distilled=False)
    """

    temperature: float = 0.25
    kind: str = "mean_abs"
    distilled: bool = False
    loss: Loss | None = field(default=None, repr=False)  # these two are set by `bcd`
    given: Distillation | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        if not isinstance(self.distilled, bool):
            raise TypeError(f"distilled={self.distilled!r}; it must be True or False")
        if not isinstance(self.temperature, int | float):
            raise TypeError(f"temperature={self.temperature!r}; it must be a number")
        if not self.temperature >= 0:
            raise ValueError(
                f"temperature={self.temperature}; it must be at least 0: 0 is greedy, inf uniform"
            )

    def saliency(self, net: nn.Module, data: ImageData) -> Tensor:
        """`fastbcd.saliency` of this kind and loss; data: the images that score, or the first."""
        if self.distilled and self.given is None:
            raise ValueError("distilled=True needs bcd with a teacher and finetune=Finetune(...)")
        given = self.given and self.given.first(len(data))  # a plan is measured on a few images
        return saliency(net, data, kind=self.kind, loss=self.loss, distill=given)

    @property
    def greedy(self) -> bool:
        """Whether all hypotheses of a step are the same, so that one is enough."""
        return self.temperature == 0

    def __call__(self, net: nn.Module, data: ImageData, size: int, *, seed: int, step: int) -> Draw:
        order = ranking(self.saliency(net, data), masks(net).bits)
        width = self.temperature * size
        return lambda trial: favouring(order, size, width, seed=seed, step=step, trial=trial)

    def describe(self) -> dict[str, Any]:
        # JSON has no infinity.
        temperature = "inf" if math.isinf(self.temperature) else float(self.temperature)
        later = {"distilled": True} if self.distilled else {}  # runs begun before it lack it
        return {"name": "saliency", "temperature": temperature, "kind": self.kind, **later}


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

    def toward(self, net: nn.Module, data: ImageData, goal: Goal, *, seed: int, step: int) -> Draw:
        """The draws of one step, each of which reaches the step's goal."""
        kept, counts = goal.masks.bits.nonzero().flatten(), goal.counts
        loss = rounded(self.saliency(net, data)[kept])
        where, (price, bonus) = goal.sites(kept), goal.limits.savings(counts)
        account = {"loss": loss, "where": where, "price": price, "bonus": bonus}
        saving = goal.limits.value(counts) - goal.limits.bounds[0].most
        worth, pays = price_of(saving, **account), break_even(**account)
        alone = loss / price[where] if (price[where] > 0).all() else loss
        order = kept[torch.from_numpy(np.argsort(alone, kind="stable"))]

        def emptied(trial: int) -> list[int]:
            factor, near = np.ones(len(counts)), worth * (1 + 1e-9)
            if trial > 1:
                stream = np.random.Philox(key=[SITES, seed], counter=[0, trial, 0, step])
                u = ((stream.random_raw(len(counts)) >> np.uint64(11)) + 0.5) * 2.0**-53
                factor, near = np.sqrt(1 / u - 1), NEAR * worth  # 1/3 to 3 in 80 % of the draws
            sites = np.argsort(pays * factor, kind="stable")
            sites = sites[(pays * factor <= near)[sites] & (bonus > 0)[sites]]
            if trial:
                sites = sites[: max(0, len(first) + MORE[trial % len(MORE)]) if trial > 1 else 0]
            beyond = loss_beyond(worth, **{**account, "loss": loss * factor[where]})
            return goal.emptied(sites, np.argsort(beyond, kind="stable"))

        first = emptied(0)
        _, after = goal.without(first)
        goal = goal.at_most(after)

        def draw(trial: int) -> Tensor:
            ids, left = goal.without(emptied(trial))
            rest = order[left.masks.bits[order]]
            size = left.size
            options = {"seed": seed, "step": step, "trial": trial}
            single = favouring(rest, size, self.temperature * size, **options)
            return torch.cat([ids, left.fit(single, lambda: rest[~torch.isin(rest, single)])])

        return draw

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "name": "blocks"}


def draws(
    proposal: Any, net: nn.Module, data: ImageData, goal: Goal, *, seed: int, step: int
) -> Draw:
    """The draws of one step, each of which reaches the step's goal."""
    if hasattr(proposal, "toward"):  # it knows more than a number of ReLUs
        return proposal.toward(net, data, goal, seed=seed, step=step)
    return fitted(proposal, net, data, goal, seed=seed, step=step)


def fitted(
    proposal: Any, net: nn.Module, data: ImageData, goal: Goal, *, seed: int, step: int
) -> Draw:
    """The draws of a proposal that knows the number of ReLUs only, fitted to the goal."""
    draw = proposal(net, data, goal.size, seed=seed, step=step)

    def fit(trial: int) -> Tensor:
        ids = drawn(proposal, draw, trial, size=goal.size)

        def rest() -> Tensor:
            others = goal.masks.without(ids).bits.nonzero().flatten()
            return shuffled(others, seed=seed, step=step, trial=trial)

        return goal.fit(ids, rest)

    return fit


def ranking(scores: Tensor, kept: Tensor) -> Tensor:
    """The kept ids from the smallest score to the largest, LongTensor; equal ones by id."""
    ids = kept.nonzero().flatten()
    return ids[torch.from_numpy(np.argsort(rounded(scores[ids]), kind="stable"))]


def rounded(scores: Tensor) -> np.ndarray:
    """Scores rounded to 20 bits.

    The rounding error of another number of threads or ranks then seldom changes their order.
    """
    mantissa, exponent = np.frexp(scores.numpy())
    return np.ldexp(np.rint(np.ldexp(mantissa, DIGITS)), exponent)


def favouring(
    order: Tensor, size: int, width: float, *, seed: int, step: int, trial: int
) -> Tensor:
    """`size` of the ids in `order`, drawn without replacement, probabilities ∝ exp(-rank/width).

    Those drawn first come first. Trial 0 takes the first ones, as every trial with width 0 does.
    """
    if not 0 <= size <= len(order):
        raise ValueError(f"cannot draw {size} ReLUs: {len(order)} are kept")
    if trial == 0 or width == 0:
        return order[:size]
    # A counter-based generator, as in MaskSet.sample: (seed; step, trial) selects the stream.
    generator = np.random.Philox(
        key=np.array([STREAM, seed], np.uint64), counter=np.array([0, 0, trial, step], np.uint64)
    )
    u = ((generator.random_raw(len(order)) >> np.uint64(11)) + 0.5) * 2.0**-53
    # The `size` largest of log(probability) - log(-log u) are such a draw (Gumbel top-k).
    with np.errstate(over="ignore"):  # infinite for a tiny width: in order, which is its limit
        keys = np.log(-np.log(u)) + np.arange(len(order)) / width
    chosen = np.argsort(keys, kind="stable")[:size]
    return order[torch.from_numpy(chosen)]


PROPOSALS: dict[str, Proposal] = {
    "uniform": Uniform(), "saliency": Saliency(), "blocks": Blocks(),
}  # fmt: skip


def find_proposal(proposal: Any) -> Proposal:
    """The proposal of this name, or the given one once it is checked."""
    if isinstance(proposal, str) and proposal in PROPOSALS:
        return PROPOSALS[proposal]
    name = f"proposal {type(proposal).__qualname__}"
    if isinstance(proposal, str):
        check_choice("proposal", proposal, [*PROPOSALS, "or give a fastbcd.Proposal"])
    if isinstance(proposal, type) or not callable(proposal):
        raise TypeError(f"proposal={proposal!r}; give a name or an object as fastbcd.Proposal")
    if not callable(getattr(proposal, "describe", None)):
        raise TypeError(f"{name} has no describe(), for config.json; derive from fastbcd.Proposal")
    try:
        inspect.signature(proposal).bind(None, None, 1, seed=0, step=1)
    except TypeError as error:
        call = "proposal(net, data, size, seed=…, step=…)"
        raise TypeError(f"{name} cannot be called as {call}: {error}") from None
    check_describe("proposal", proposal)
    return proposal


def check_describe(what: str, value: Any) -> None:
    """Refuse a proposal or a schedule whose describe() cannot be written into config.json."""
    try:
        json.dumps(value.describe())
    except (TypeError, ValueError) as error:
        name = f"{what} {type(value).__qualname__}"
        raise TypeError(f"{name}: describe() must return JSON-able values: {error}") from None


def drawn(proposal: Proposal, draw: Draw, trial: int, *, size: int) -> Tensor:
    """Hypothesis `trial`: `size` different ids, or an error that names the proposal."""
    ids = torch.as_tensor(draw(trial))
    if ids.ndim != 1 or len(ids) != size or len(ids.unique()) != size:
        raise ValueError(
            f"proposal {type(proposal).__qualname__}: hypothesis {trial} is a tensor of shape "
            f"{tuple(ids.shape)}; expected {size} ids, each once"
        )
    return ids
