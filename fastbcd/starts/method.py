"""Method: how a starting point trains masks. Methods differ in three things:

    the value of each unit      Method.values
    when bits change            Method.train
    how many are kept           Method.done, Method.decide

What is the same for all is in mask_training.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.descent.budget import Limits
from fastbcd.descent.goals import Goal
from fastbcd.descent.proposals import shuffled
from fastbcd.masking.activations import MaskedActivation, MaskedReLU
from fastbcd.masking.masks import MaskSet, mask_modules, masks
from fastbcd.runs.step import Epoch
from fastbcd.runtime.settings import Settings, setting
from fastbcd.training.loop import Session
from fastbcd.training.settings import Finetune

ADAM: dict[str, Any] = {"optimizer": "adam", "weight_decay": 0.0}


# The help of `finetune`.
TUNED = (
    "after the masks are fixed; None: no fine-tune. Its crops, flips, temperature, weight of the "
    "distillation and mixed precision are those of the mask training too; so is its optimizer, "
    "unless the method has its own"
)


@dataclass(frozen=True, kw_only=True)
class MaskTraining(Settings):
    """What every starting point takes beside the net, the data and the budget."""

    teacher: nn.Module | None = setting(
        None, "a net to distil from; None: the net as it is given", recorded=False
    )
    test: object = setting(
        None, "the test set, if accuracy is to be measured", recorded=False
    )
    finetune: Finetune | None = setting(None, TUNED)
    batch_size: int = setting(128, "images of a batch of the mask training", least=1)
    seed: int = setting(0, "of all random numbers", least=0, most=2**63 - 1)
    run_dir: str | os.PathLike[str] | None = setting(
        None,
        "where every epoch is saved; the same call resumes from there",
        recorded=False,
    )
    resume: str | bool = setting(
        "auto", 'as in `bcd`: "auto", "must", "never"', recorded=False
    )
    progress: bool = setting(
        False, "show progress bars and one line per epoch", recorded=False
    )


class MaskEpoch(NamedTuple):
    """An epoch of the mask training: what trains, and its record after those before it."""

    session: Session
    record: Epoch
    history: Sequence[Epoch]
    bar: Any

    def train(self, lr: float, **hooks: Any) -> None:
        """Train on every image once; hooks: penalty and before_batch of `Session.epoch`."""
        number = len(self.history)
        self.record.loss = self.session.epoch(number, lr, bar=self.bar, **hooks)


class Method:
    """The training of a net's masks.

    start: the masks at the start, whose removed ReLUs stay removed. budget: the number of ReLUs to
    aim at. model: on the net's own weights, with the activations `acts`.
    """

    name: ClassVar[str]  # of its function
    optimizer: ClassVar[dict[str, Any]] = {}  # changes to the fine-tune's settings
    matched = False  # whether it needs a teacher with the net's sites
    advice = ""  # if the training ends above the budget, or `slack` times the budget
    slack = 1.0
    settings: Any

    def __init__(
        self, net: nn.Module, data: ImageData, limits: Limits, settings: Any
    ) -> None:
        self.net = net
        self.data = data
        self.settings = settings
        self.start = masks(net).copy()
        self.goal = Goal(self.start, limits, limits)
        kept = self.start.bits.nonzero().flatten()
        in_random_order = shuffled(kept, seed=0, step=0, trial=0)
        self.budget = len(kept) - len(self.goal.fit(in_random_order, kept[:0]))
        self.model = self.trained_net()
        self.acts: list[Any] = list(mask_modules(self.model).values())
        self.begin()

    @classmethod
    def prepare(cls, net: nn.Module, settings: Any) -> nn.Module:
        """The net whose masks are trained; refuses one that the method cannot take."""
        for name, act in mask_modules(net).items():
            if type(act) is not MaskedReLU:
                raise ValueError(
                    f"site {name!r} is a {type(act).__name__}; use fastbcd.autorep"
                )
        return net

    def trained_net(self) -> nn.Module:
        """The net, or one on its weights with other activations."""
        return self.net

    def begin(self) -> None:
        """What is measured before the first epoch, on the net as it was at the start."""

    def train(self, epoch: MaskEpoch) -> None:
        """Train for an epoch, change bits, and complete the epoch's record."""
        raise NotImplementedError

    def done(self, history: Sequence[Epoch]) -> bool:
        """Whether the masks are trained after these epochs."""
        return len(history) >= self.settings.epochs

    def bits(self) -> Tensor:
        """The units that are on, bool [total], on the CPU."""
        return self.gather("mask")

    def masks(self) -> MaskSet:
        """The units that are on, as masks."""
        return MaskSet(self.start.sites, self.bits())

    def values(self) -> Tensor:
        """The value of each unit, [total]; here at random."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        return torch.rand(self.start.total, generator=generator)

    def decide(self) -> MaskSet:
        """The masks that are kept: first the units that are on, each by its value, ties by id."""
        order = self.ranked(self.values())
        on = self.bits()[order]
        order = torch.cat([order[on], order[~on]])
        return self.start.without(self.goal.fit(order.flip(0), order[:0]))

    def ranked(self, values: Tensor) -> Tensor:
        """The ids of the units kept at the start, from the largest value to the smallest."""
        kept = self.start.bits.nonzero().flatten()
        return kept[torch.sort(values[kept], descending=True, stable=True).indices]

    def gather(self, name: str) -> Tensor:
        """A tensor that every activation has, [*shape], by the units' flat ids, on the CPU."""
        tensors = [getattr(act, name).detach().flatten() for act in self.acts]
        return torch.cat(tensors).cpu()


class TrainedMask(MaskedActivation):
    """An activation whose mask, in the memory format of training, is trained."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(tuple(mask.shape), device=mask.device)
        self.mask = channels_last(mask.bool())


def channels_last(t: Tensor) -> Tensor:
    """A copy of [C, *spatial] with C innermost in memory, as activations lie in training."""
    return t.movedim(0, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 0)


def allocate(budget: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """`budget` shared out in proportion to the weights, at most most[i] each.

    Rounded down, and the rest goes to the largest fractions, ties by position. Sites of weight 0
    get something only when all others are full, then in equal parts.

    >>> allocate(10, [1, 1, 3], [8, 8, 4])
    [3, 3, 4]
    """
    if budget > sum(most):
        raise ValueError(f"budget={budget:,}; there is room for {sum(most):,}")
    weights = [max(weight, 1e-9) for weight in weights]
    counts = [0] * len(most)
    while left := budget - sum(counts):  # the sites that are not full share it
        free = [site for site, count in enumerate(counts) if count < most[site]]
        total = math.fsum(weights[site] for site in free)
        shares = {site: left * weights[site] / total for site in free}
        full = [site for site in free if shares[site] >= most[site]]
        for site in full:
            counts[site] = most[site]
        if not full:
            for site in free:
                counts[site] = math.floor(shares[site])
            free.sort(key=lambda site: counts[site] - shares[site])
            for site in free[: budget - sum(counts)]:
                counts[site] += 1
    return counts
