"""Proposals: which kept ReLUs a hypothesis removes.

A proposal is called once per step and returns a pure function of the number of a hypothesis, so
that hypotheses do not depend on how they are batched, on ranks or on an interruption.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.descent.goals import Goal
from fastbcd.descent.problem import Problem
from fastbcd.descent.saliency import KINDS, ranking, saliency
from fastbcd.descent.tuning import Training
from fastbcd.masking.masks import masks
from fastbcd.runtime.philox import RANKS, SHUFFLE, philox, uniform
from fastbcd.runtime.settings import fields_of
from fastbcd.runtime.validate import check_choice, check_number
from fastbcd.scoring.metric import Loss
from fastbcd.training.teacher import Distillation

Draw = Callable[[int], Tensor]  # trial -> LongTensor[size] of kept ids, no repeats


class Proposal(ABC):
    """Derive from it to draw hypotheses in another way.

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

    # Whether all hypotheses of a step are the same, so that one is enough.
    greedy = False

    @abstractmethod
    def __call__(
        self, net: nn.Module, data: ImageData, size: int, *, seed: int, step: int
    ) -> Draw:
        """The draws of one step."""

    def toward(
        self, net: nn.Module, data: ImageData, goal: Goal, *, seed: int, step: int
    ) -> Draw:
        """The draws of one step, each fitted to the step's goal."""
        size = goal.size
        draw = self(net, data, size, seed=seed, step=step)
        kept = goal.masks.bits.nonzero().flatten()
        every = shuffled(kept, seed=seed, step=step, trial=0)

        def fit(trial: int) -> Tensor:
            ids = torch.as_tensor(draw(trial))
            if ids.ndim != 1 or len(ids) != size or len(ids.unique()) != size:
                raise ValueError(
                    f"proposal {type(self).__qualname__}: hypothesis {trial} is a tensor of shape "
                    f"{tuple(ids.shape)}; expected {size} ids, each once"
                )
            return goal.fit(goal.masks.check_kept(ids), every)

        return fit

    def informed(self, problem: Problem, training: Training) -> Proposal:
        """The proposal for a run, whose loss and teacher it may ask for."""
        return self

    def describe(self) -> Any:
        """What config.json records: JSON-able, and different if the draws are different."""
        return {"name": type(self).__qualname__, **fields_of(self)}


class Uniform(Proposal):
    """The paper's: `size` kept ReLUs, uniform over all such sets."""

    def __call__(
        self, net: nn.Module, data: ImageData, size: int, *, seed: int, step: int
    ) -> Draw:
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
    whatever RT); a large one is nearly uniform. kind is that of `fastbcd.saliency`. distilled: of
    the loss that `Finetune` minimises with the teacher, in place of the cross-entropy alone.

    >>> Saliency(temperature=0.5)
    Saliency(temperature=0.5, kind='mean_abs', distilled=False)
    """

    name = "saliency"
    temperature: float = 0.25
    kind: str = "mean_abs"
    distilled: bool = False
    loss: Loss | None = field(default=None, repr=False)  # these two are set by `bcd`
    answers: Distillation | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_number("temperature", self.temperature, 0)

    def informed(self, problem: Problem, training: Training) -> Saliency:
        answers = None
        if self.distilled:
            answers = training.answers(problem.scored)
            if answers is None:
                raise ValueError(f"{self} needs teacher= and finetune=Finetune(...)")
        return replace(self, loss=problem.criterion.loss, answers=answers)

    def saliency(self, net: nn.Module, data: ImageData) -> Tensor:
        """`fastbcd.saliency` of this kind and loss; data: the images that score, or the first."""
        distill = self.answers
        if distill is not None:
            distill = distill.first(len(data))  # a plan is measured on a few images
        elif self.distilled:
            raise ValueError(
                "distilled=True needs bcd with a teacher and finetune=Finetune(...)"
            )
        return saliency(net, data, kind=self.kind, loss=self.loss, distill=distill)

    @property
    def greedy(self) -> bool:  # type: ignore[override]
        return self.temperature == 0

    def __call__(
        self, net: nn.Module, data: ImageData, size: int, *, seed: int, step: int
    ) -> Draw:
        order = ranking(self.saliency(net, data), masks(net).bits)
        width = self.temperature * size
        return lambda trial: favouring(
            order, size, width, seed=seed, step=step, trial=trial
        )

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "name": self.name,
            "temperature": float(self.temperature),
            "kind": self.kind,
        }
        if self.distilled:
            described["distilled"] = True
        return described


def favouring(
    order: Tensor, size: int, width: float, *, seed: int, step: int, trial: int
) -> Tensor:
    """`size` of the ids in `order`, drawn without replacement, probabilities ∝ exp(-rank/width).

    Those drawn first come first. Trial 0 takes the first ones, as every trial with width 0 does.
    """
    if trial == 0 or width == 0:
        return order[:size]
    u = uniform(philox(RANKS, seed=seed, step=step, epoch=trial), len(order))
    # The `size` largest of log(probability) - log(-log u) are such a draw (Gumbel top-k).
    # For a tiny width keys are infinite: ids are then in order, which is its limit.
    with np.errstate(over="ignore"):
        keys = np.log(-np.log(u)) + np.arange(len(order)) / width
    chosen = np.argsort(keys, kind="stable")[:size]
    return order[torch.from_numpy(chosen)]


def shuffled(ids: Tensor, *, seed: int, step: int, trial: int) -> Tensor:
    """The ids in a random order that is a pure function of the other arguments and their number."""
    u = uniform(philox(SHUFFLE, seed=seed, step=step, trial=trial), len(ids))
    return ids[torch.from_numpy(np.argsort(u, kind="stable"))]
