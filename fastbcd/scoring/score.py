"""score: the accuracy and the loss of every hypothesis, a set of kept ReLUs to remove.

All engines give the same numbers: `sequential` is the paper's loop, `stacked` runs all hypotheses
in one pass per data batch, `collapsed` runs them on the net's collapsed form, which is cheap when
few ReLUs are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
    net: nn.Module, removals: Tensor | Iterable[Tensor], data: Any, engine: str | Engine = "auto",
    *, explain: bool = False,
) -> Scores:  # fmt: skip
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
    found = [tally.mean(k) for k in range(len(hypotheses))]
    return Scores(
        torch.tensor([correct for correct, _ in found], dtype=torch.int64),
        torch.tensor([loss for _, loss in found], dtype=torch.float64),
        *tally.mean(-1), len(images), plan.engine.name,
    )  # fmt: skip


@dataclass
class Tally:
    """Sums over the images so far."""

    sums: dict[int, tuple[int, float]]  # by number (-1: the base): correct answers, loss
    seen: int = 0  # images
    rounds: int = 0  # batches, a rank

    def part(self, numbers: Iterable[int]) -> Tally:
        """The sums of some hypotheses."""
        return replace(self, sums={k: self.sums[k] for k in numbers})

    def mean(self, number: int) -> tuple[int, float]:
        """Correct answers and mean loss."""
        return self.sums[number][0], self.sums[number][1] / self.seen


Decide = Callable[[Tally], set[int]]


def run_pass(
    plan: Plan, data: ImageData, removals: dict[int, Tensor], decide: Decide | None = None,
    base: bool = True, begun: Tally | None = None,
) -> Tally:  # fmt: skip
    """Score the hypotheses batch by batch, and the base too unless its counts are known.

    begun: an earlier pass over these hypotheses, to continue. decide: names those that still
    matter after a batch; the pass ends when none does. Each rank runs its shard of the images;
    the tally is that of all ranks, so they decide alike.
    """
    tally = Tally({}) if begun is None else begun
    alive = dict(removals)
    # A hypothesis that removes nothing is the base.
    base = base or not all(ids.numel() for ids in removals.values())
    work = plan.engine.prepare(alive, plan.lanes)
    with torch.inference_mode():
        for x, labels in _rounds(data, plan, tally.rounds):
            numbers = [-1, *alive] if base else list(alive)
            nothing = torch.zeros(2, dtype=torch.float64, device=x.device)
            found: dict[int, Tensor] = {}
            if len(labels):
                for some, logits in plan.engine.logits(x, work, base, tally.rounds):
                    found.update(zip(some, _judge(logits, labels), strict=True))
            rows = [found[k] if k in found else found.get(-1, nothing) for k in numbers]
            mine = torch.cat([*rows, nothing.new_tensor([len(labels)])])
            *total, images = all_sum(mine).tolist()
            for number, correct, loss in zip(numbers, total[::2], total[1::2], strict=True):
                if math.isnan(loss):
                    who = "the base net" if number == -1 else f"hypothesis {number}"
                    raise FloatingPointError(
                        f"{who} gives NaN logits in the batch of images {tally.seen} to "
                        f"{tally.seen + int(images) - 1}; look at the weights and at the range of "
                        f"the activations"
                    )
                before = tally.sums.get(number, (0, 0.0))
                tally.sums[number] = before[0] + int(correct), before[1] + loss
            tally.seen += int(images)
            tally.rounds += 1
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
    yield from shard.rest(first * plan.batch).batches(
        plan.batch, dtype=plan.request.example.dtype, memory_format=plan.engine.memory_format
    )
    most = math.ceil(math.ceil(len(data) / world()) / plan.batch)
    for _ in range(most - max(first, math.ceil(len(shard) / plan.batch))):
        yield shard.images[:0], shard.labels[:0]


def _judge(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [n, B, classes] -> correct answers and summed cross-entropy, DoubleTensor[n, 2]."""
    hits = logits.argmax(-1) == labels
    answers = logits.double().flatten(0, 1), labels.repeat(len(logits))
    losses = F.cross_entropy(*answers, reduction="none").view(hits.shape)
    return torch.stack([hits.double().sum(1), losses.sum(1)], 1)


def read(net: nn.Module, data: Any) -> tuple[ImageData, MaskSet]:
    """The images and a copy of the net's masks, which are on the same device."""
    images = as_data(data)
    check_device(net, images, "the net")
    return images, masks(net).copy()


@contextmanager
def prepared(
    net: nn.Module, current: MaskSet, removals: list[Tensor], images: ImageData, engine: Engine,
    expected: int | None = None,
) -> Iterator[Plan]:  # fmt: skip
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
            plan = make_plan(Request(
                net, current, removals, expected or len(removals), len(images), example,
                engine.batch_size, limit, engine.tf32,
            ), engine.name)  # fmt: skip
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
    for k, given in enumerate(removals, first):
        try:
            ids = current.check_kept(torch.as_tensor(given))
        except (ValueError, IndexError, TypeError) as error:
            raise type(error)(f"hypothesis {k}: {error}") from None
        if ids.ndim != 1:
            raise ValueError(f"hypothesis {k} has shape {tuple(ids.shape)}; expected [D]: D ids")
        if len(ids.unique()) != len(ids):
            raise ValueError(f"hypothesis {k} names a ReLU twice")
        checked.append(ids)
    return checked
