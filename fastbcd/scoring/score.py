"""score: the accuracy and the loss of every hypothesis on the train set.

    scores = fastbcd.score(net, removals, data)     # removals: LongTensor[K, D] of flat ids
    scores.drop                                     # accuracy drop in percentage points, [K]

A hypothesis is a set of kept ReLUs to remove. All engines give the same numbers: `sequential`
is the paper's loop, `stacked` runs all hypotheses in one pass per data batch, `collapsed` runs
them on the net's collapsed form, which is cheap when few ReLUs are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from fastbcd.masking.masks import MaskSet, mask_modules, masks, set_masks
from fastbcd.runtime.limits import default_memory
from fastbcd.runtime.malloc import kept_memory
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.ranks import all_sum, from_first, rank, world
from fastbcd.runtime.tf32 import own_precision
from fastbcd.scoring.accuracy import check_classes, check_device, dtype_of
from fastbcd.scoring.engine import Engine, Request, as_engine
from fastbcd.scoring.plan import Plan, make_plan

__all__ = ["Scores", "score"]


@dataclass(frozen=True)
class Scores:
    """What `score` found: K hypotheses and the base, which is the net as it is.

    >>> Scores(torch.tensor([90, 95]), torch.zeros(2), 96, 0.0, 100, "stacked").drop
    tensor([6., 1.], dtype=torch.float64)
    """

    correct: Tensor  # LongTensor[K]
    loss: Tensor  # DoubleTensor[K], mean cross-entropy
    base_correct: int
    base_loss: float
    samples: int
    engine: str

    @property
    def drop(self) -> Tensor:
        """Accuracy drop of each hypothesis in percentage points, DoubleTensor[K]."""
        return 100.0 * (self.base_correct - self.correct).double() / self.samples


def score(
    net: nn.Module,
    removals: Tensor | Iterable[Tensor],
    data: Any,
    engine: str | Engine = "auto",
    *,
    explain: bool = False,
) -> Scores:
    """Score each removal on all of `data`, in eval mode and without augmentation.

    Args:
        net: with masked activations; its masks and its mode are as before afterwards.
        removals: LongTensor[K, D] of flat ids of kept ReLUs, or K tensors of any lengths.
        data: ImageData, a pair (images, labels), a Dataset or a DataLoader.
        engine: "auto", "sequential", "stacked", "collapsed", or `Engine(...)` with options. The
            numbers do not depend on it.
        explain: print the plan first.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> images, labels = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> scores = score(net, torch.tensor([[0, 1], [4, 5]]), (images, labels))
    >>> scores.correct.shape, scores.samples
    (torch.Size([2]), 50)
    """
    images, current = read(net, data)
    hypotheses = check_removals(current, removals)
    with prepared(net, current, hypotheses, images, as_engine(engine)) as plan:
        if explain:
            print(plan)
        tally = run_pass(plan, images, dict(enumerate(hypotheses)))
    return Scores(
        correct=torch.tensor([tally.correct[k] for k in range(len(hypotheses))], dtype=torch.int64),
        loss=torch.tensor(
            [tally.mean_loss(k) for k in range(len(hypotheses))], dtype=torch.float64
        ),
        base_correct=tally.correct[-1],
        base_loss=tally.mean_loss(-1),
        samples=len(images),
        engine=plan.engine.name,
    )


# ------------------------------------------------------------------------------- the pass


class Tally:
    """Counts over the images so far; number -1 is the base."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.correct = dict.fromkeys([-1, *numbers], 0)
        self.loss = dict.fromkeys([-1, *numbers], 0.0)
        self.seen = 0  # images
        self.rounds = 0  # batches, a rank

    def mean_loss(self, number: int) -> float:
        return self.loss[number] / self.seen

    def alone(self, number: int) -> Tally:
        """The counts of one hypothesis."""
        one = Tally([number])
        one.correct[number], one.loss[number] = self.correct[number], self.loss[number]
        one.seen, one.rounds = self.seen, self.rounds
        return one

    @staticmethod
    def together(parts: dict[int, Tally]) -> Tally:
        """The tallies of hypotheses that stopped after the same image, as one."""
        tally = Tally(list(parts))
        for number, part in parts.items():
            tally.correct[number], tally.loss[number] = part.correct[number], part.loss[number]
            tally.seen, tally.rounds = part.seen, part.rounds
        return tally


Decide = Callable[[Tally], set[int]]


def run_pass(
    plan: Plan,
    data: ImageData,
    removals: dict[int, Tensor],
    decide: Decide | None = None,
    base: bool = True,
    begun: Tally | None = None,
) -> Tally:
    """Score the hypotheses batch by batch, and the base too unless its counts are known.

    begun: the tally of an earlier pass over these hypotheses, to continue.
    After each batch `decide` names those that still matter; the pass ends when none does. Each
    rank runs its shard of the images; the tally is that of all ranks, so they decide alike.
    """
    tally = Tally(list(removals)) if begun is None else begun
    alive = dict(removals)
    # A hypothesis that removes nothing is the base.
    base = base or not all(ids.numel() for ids in removals.values())
    work = plan.engine.prepare(alive, plan.lanes)
    with torch.inference_mode():
        for x, labels in _rounds(data, plan, tally.rounds):
            tally.rounds += 1
            numbers = [-1, *alive] if base else list(alive)
            found: dict[int, tuple[int, float]] = dict.fromkeys(numbers, (0, 0.0))
            if len(labels):
                found = {}
                for some, logits in plan.engine.logits(x, work, base):
                    found.update(zip(some, _judge(logits, labels), strict=True))
            mine = [(*(found[k] if k in found else found[-1]), len(labels)) for k in numbers]
            total = all_sum(torch.tensor(mine, dtype=torch.float64)).tolist()
            for number, (correct, loss, images) in zip(numbers, total, strict=True):
                _check_finite(number, loss, tally.seen, int(images))
                tally.correct[number] += int(correct)
                tally.loss[number] += loss
            tally.seen += int(total[0][2])
            if decide is None:
                continue
            still = decide(tally)
            if not still:
                break
            if still != set(alive):
                alive = {k: alive[k] for k in alive if k in still}
                work = plan.engine.prepare(alive, plan.lanes)
    return tally


def _rounds(data: ImageData, plan: Plan, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches from `first` on, and empty ones up to the number of other ranks."""
    shard = data.shard(rank(), world())
    todo = shard.rest(first * plan.batch)
    yield from todo.batches(plan.batch, dtype=plan.dtype, memory_format=plan.engine.memory_format)
    most = math.ceil(math.ceil(len(data) / world()) / plan.batch)
    for _ in range(most - max(first, math.ceil(len(shard) / plan.batch))):
        yield shard.images[:0], shard.labels[:0]


def _judge(logits: Tensor, labels: Tensor) -> list[tuple[int, float]]:
    """logits [n, B, classes] -> (how many are right, summed cross-entropy) for each of n."""
    n = logits.shape[0]
    hits = (logits.argmax(-1) == labels).sum(1)
    losses = F.cross_entropy(
        logits.double().flatten(0, 1), labels.repeat(n), reduction="none"
    ).view(n, -1)
    return list(zip(hits.tolist(), losses.sum(1).tolist(), strict=True))


def _check_finite(number: int, loss: float, seen: int, batch: int) -> None:
    if loss != loss:
        who = "the base net" if number == -1 else f"hypothesis {number}"
        raise FloatingPointError(
            f"{who} gives NaN logits in the batch of images {seen} to {seen + batch - 1}; "
            f"look at the weights and at the range of the activations"
        )


# ---------------------------------------------------------------------------- preparation


def read(net: nn.Module, data: Any) -> tuple[ImageData, MaskSet]:
    """The images and a copy of the net's masks, which are on the same device."""
    images = as_data(data)
    check_device(net, images, "the net")
    return images, masks(net).copy()


@contextmanager
def prepared(
    net: nn.Module,
    current: MaskSet,
    removals: list[Tensor],
    images: ImageData,
    engine: Engine,
    expected: int | None = None,
) -> Iterator[Plan]:
    """The plan, with the net in eval mode; afterwards the net is as it was.

    current: a copy of the net's masks. removals: all, or some that are typical of the
    `expected` number of them. Precision is stated here: a caller's autocast has no effect.
    """
    with own_precision(images.device, engine.tf32), eval_mode(net), ExitStack() as stack:
        check_scorable(net, images)
        stack.callback(set_masks, net, current)
        with torch.inference_mode():
            example = next(images.batches(2, dtype=dtype_of(net)))[0]
            limit = default_memory(example.device) if engine.memory is None else engine.memory
            # Ranks plan alike, whatever memory each of them has.
            limit = int(from_first(torch.tensor(min(limit, 2**62))))
            number = len(removals) if expected is None else expected
            request = Request(
                net, current, removals, number, len(images), example, engine.batch_size, limit,
                engine.tf32,
            )  # fmt: skip
            plan = make_plan(request, engine.name)
        if plan.engine.name == "stacked":
            stack.enter_context(kept_memory())
        yield plan


def check_scorable(net: nn.Module, images: ImageData) -> None:
    """An error if this net cannot be scored on these images."""
    if not len(images):
        raise ValueError("there are no images to score on")
    mask_modules(net)  # the first error of a net without masks
    check_classes(net, images, "the net")


def check_removals(
    current: MaskSet, removals: Tensor | Iterable[Tensor], first: int = 0
) -> list[Tensor]:
    """Each removal as a LongTensor of distinct kept ids; errors count from `first`."""
    if isinstance(removals, Tensor) and removals.ndim != 2:
        raise ValueError(
            f"removals have shape {tuple(removals.shape)}; expected [K, D]: K hypotheses of D ids"
        )
    checked = []
    for k, ids in enumerate(removals, first):
        try:
            ids = current.check_kept(torch.as_tensor(ids))
        except (ValueError, IndexError, TypeError) as error:
            raise type(error)(f"hypothesis {k}: {error}") from None
        if ids.ndim != 1:
            raise ValueError(f"hypothesis {k} has shape {tuple(ids.shape)}; expected [D]: D ids")
        if len(ids.unique()) != len(ids):
            raise ValueError(f"hypothesis {k} names a ReLU twice")
        checked.append(ids)
    return checked
