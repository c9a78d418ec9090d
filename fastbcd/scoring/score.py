"""score: the accuracy and the loss of every hypothesis, a set of kept ReLUs to remove.

All engines give the same numbers: `sequential` is the paper's loop, `stacked` runs all hypotheses
in one pass per data batch, `collapsed` runs them on the net's collapsed form, which is cheap when
few ReLUs are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastbcd.data.for_net import data_for
from fastbcd.data.images import ImageData
from fastbcd.masking.convert import unwrap
from fastbcd.masking.masks import MaskSet, mask_modules, masks, set_masks
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.limits import default_memory
from fastbcd.runtime.malloc import kept_memory
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.ranks import all_sum, from_first, rank, world
from fastbcd.runtime.tf32 import own_precision, repeatable_convolutions
from fastbcd.scoring.accuracy import check_metric
from fastbcd.scoring.engine import Engine, Request, as_engine
from fastbcd.scoring.metric import DEFAULT, WIDTH, Criterion, Loss, Metric, at_least_float32
from fastbcd.scoring.plan import ScoringPlan, make_plan
from fastbcd.scoring.stacked import Stacked

LOOK_EVERY = 64  # batches between two reads of the sums, at most: invalid values are found there


@dataclass(frozen=True)
class Scores:
    """What `score` found: K hypotheses and the base, which is the net as it is.

    >>> Scores(torch.tensor([90, 95]), torch.zeros(2), 96, 0.0, 100, "stacked").drop
    tensor([6., 1.], dtype=torch.float64)
    """

    correct: Tensor | None  # LongTensor[K]; None with a metric of your own
    loss: Tensor  # DoubleTensor[K], mean cross-entropy, or mean of your own loss
    base_correct: int | None
    base_loss: float
    samples: int
    engine: str
    value: Tensor = None  # type: ignore[assignment]  # DoubleTensor[K], mean of the metric
    base_value: float = None  # type: ignore[assignment]
    points: float = 100.0  # percentage points per unit of the metric; 1 without bounds

    def __post_init__(self) -> None:
        if self.correct is not None and self.base_correct is not None:
            object.__setattr__(self, "value", self.correct.double() / self.samples)
            object.__setattr__(self, "base_value", self.base_correct / self.samples)

    @property
    def drop(self) -> Tensor:
        """How much less the metric is than the base's, DoubleTensor[K].

        In percentage points (of accuracy, or of the range of a metric with bounds), or in the
        units of a metric without bounds.
        """
        if self.correct is None or self.base_correct is None:
            return self.points * (self.base_value - self.value)
        return 100.0 * (self.base_correct - self.correct).double() / self.samples


def score(
    net: nn.Module, removals: Tensor | Iterable[Tensor], data: Any, engine: str | Engine = "auto",
    *, metric: Metric | None = None, loss: Loss | None = None, explain: bool = False,
) -> Scores:  # fmt: skip
    """Score each removal on all of `data`, in eval mode and without augmentation.

    Args:
        net: with masked activations; its masks and its mode are as before afterwards.
        removals: LongTensor[K, D] of flat ids of kept ReLUs, or K tensors of any lengths.
        data: ImageData, a pair (images, labels), a Dataset or a DataLoader.
        engine: "auto", "sequential", "stacked", "collapsed", or `Engine(...)` with options. The
            numbers do not depend on it.
        metric: a callable (outputs, targets) -> [B], one value per sample, larger is better; None:
            1 where the largest logit is that of the label, else 0. If values have limits, state
            them as metric.bounds = (low, high).
        loss: a callable (outputs, targets) -> [B], or their mean; None: cross-entropy.
        explain: print the plan first.

    The net may return a tensor of any shape, a tuple or a dict; metric and loss see the outputs of
    one hypothesis for one batch at a time.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> images, labels = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> scores = score(net, torch.tensor([[0, 1], [4, 5]]), (images, labels))
    >>> scores.correct.shape, scores.samples
    (torch.Size([2]), 50)
    """
    criterion, net = Criterion(metric, loss), unwrap(net)
    images, current = read(net, data)
    hypotheses = check_removals(current, removals)
    with prepared(net, current, hypotheses, images, as_engine(engine), criterion) as plan:
        if explain:
            print(f"data: {images}, {images.where}", plan, sep="\n")
        tally, samples = run_pass(plan, criterion, images, dict(enumerate(hypotheses))), len(images)
    numbers = [*range(len(hypotheses)), -1]
    sums = torch.tensor([tally.sums[k] for k in numbers], dtype=torch.float64)
    means, own = sums / samples, metric is not None
    return Scores(
        None if own else sums[:-1, 0].long(), means[:-1, 1],
        None if own else int(sums[-1, 0]), float(means[-1, 1]), samples, plan.engine.name,
        means[:-1, 0], float(means[-1, 0]), criterion.points,
    )  # fmt: skip


@dataclass
class Tally:
    """Sums over the images so far."""

    sums: dict[int, tuple[float, float]]  # by number (-1: the base): metric, loss
    seen: int = 0  # images
    rounds: int = 0  # batches, a rank

    def part(self, numbers: Iterable[int]) -> Tally:
        """The sums of some hypotheses."""
        return replace(self, sums={k: self.sums[k] for k in numbers})

    def add(self, rows: dict[int, list[float]], images: int, criterion: Criterion) -> None:
        """Add the rows of one batch, by number."""
        where = f"in the batch of images {self.seen} to {self.seen + images - 1}"
        for k, row in rows.items():
            criterion.check_row(row, "the base net" if k < 0 else f"hypothesis {k}", where)
            value, loss = self.sums.get(k, (0.0, 0.0))
            self.sums[k] = value + row[0], loss + row[1]
        self.seen, self.rounds = self.seen + images, self.rounds + 1


Decide = Callable[[Tally], tuple[set[int], float]]


def run_pass(
    plan: ScoringPlan, criterion: Criterion, data: ImageData, removals: dict[int, Tensor],
    decide: Decide | None = None, base: bool = True, begun: Tally | None = None,
) -> Tally:  # fmt: skip
    """Score the hypotheses batch by batch, and the base too unless its sums are known.

    begun: an earlier pass over these hypotheses, to continue. decide: called after a batch, it
    names those that still matter, and how many images must be seen before that can change; the
    pass ends when none matters. Until then sums stay on the device. Each rank runs its shard of the
    images; the tally is that of all ranks, so they decide alike.
    """
    tally = Tally({}) if begun is None else begun
    # A hypothesis that removes nothing is the base.
    base = base or not all(ids.numel() for ids in removals.values())
    lanes = _Lanes(plan, removals)
    nothing = torch.zeros(WIDTH, dtype=torch.float64, device=data.device)
    pending: list[Tensor] = []
    look = 0.0 if decide else torch.inf  # images after which a decision is possible
    sizes, first = _round_sizes(data, plan.batch), rank() * len(data) // world()
    batches = data.shard(rank(), world()).rest(tally.rounds * plan.batch).batches(
        plan.batch, dtype=plan.request.example.dtype, memory_format=plan.engine.memory_format
    )  # fmt: skip
    with torch.inference_mode():
        for i in range(tally.rounds, len(sizes)):
            x, targets = next(batches, (None, None))  # other ranks may have more
            numbers = [-1, *lanes.removals] if base else list(lanes.removals)
            found: dict[int, Tensor] = {}
            if x is not None and targets is not None:
                places = torch.arange(len(x)) + (first + i * plan.batch)
                found = lanes.run(x, base, places, partial(criterion.rows, targets=targets))
            pending.append(torch.stack([found.get(k, found.get(-1, nothing)) for k in numbers]))
            seen = tally.seen + sum(sizes[tally.rounds : i + 1])
            if seen < look and len(pending) < LOOK_EVERY and i + 1 < len(sizes):
                continue
            for rows in all_sum(torch.stack(pending)).tolist():
                by_number = dict(zip(numbers, rows, strict=True))
                tally.add(by_number, sizes[tally.rounds], criterion)
            pending = []
            if decide is None:
                continue
            still, wait = decide(tally)
            if not still:
                break
            look = tally.seen + wait
            if still != set(lanes.removals):
                lanes = _Lanes(plan, {k: v for k, v in lanes.removals.items() if k in still})
    return tally


class _Lanes:
    """Hypotheses that run together, as the engine has prepared them."""

    def __init__(self, plan: ScoringPlan, removals: dict[int, Tensor]) -> None:
        self.plan, self.removals = plan, removals
        self.work = plan.engine.prepare(removals, plan.lanes)

    def run(
        self, x: Tensor, base: bool, images: Tensor | None, judge: Callable[[Any], Tensor]
    ) -> dict[int, Tensor]:
        """What `judge` makes of the outputs, by number; after an out-of-memory error, in parts."""
        while True:
            try:
                found: dict[int, Tensor] = {}
                for some, outputs in self.plan.engine.logits(x, self.work, base, images):
                    with torch.autocast(x.device.type, enabled=False):  # that of bf16
                        outputs = tree_map_only(Tensor, at_least_float32, outputs)
                        found.update(zip(some, judge(outputs), strict=True))
                return found
            except torch.OutOfMemoryError as error:
                self.plan.use_fewer_lanes(len(self.removals), error)
                self.work = self.plan.engine.prepare(self.removals, self.plan.lanes)


def answers(
    plan: ScoringPlan, criterion: Criterion, data: ImageData, removals: dict[int, Tensor],
    base: bool, images: Tensor | None = None,
) -> dict[int, Tensor]:  # fmt: skip
    """By number, the margin and the loss of each image, DoubleTensor[2, N] on the CPU.

    The margin is the logit of the label minus the largest other one. Each rank runs a part of the
    images; all get all numbers. images: int64 [N] on the CPU, which images of the plan's data
    these are; an engine may keep what it computes of them.
    """
    asked = base or not all(ids.numel() for ids in removals.values())
    numbers, lanes = [-1, *removals] if asked else list(removals), _Lanes(plan, removals)
    mine, at = data.shard(rank(), world()), rank() * len(data) // world()
    found = torch.zeros(len(numbers), 2, len(data), dtype=torch.float64, device=data.device)
    with torch.inference_mode():
        for x, targets in mine.batches(
            plan.batch, dtype=plan.request.example.dtype, memory_format=plan.engine.memory_format
        ):
            judge = partial(criterion.margins_and_losses, targets=targets)
            places = None if images is None else images[at : at + len(x)]
            some = lanes.run(x, asked, places, judge)
            both = [some[k if k in some else -1] for k in numbers]
            found[:, :, at : at + len(x)] = torch.stack(both)
            at += len(x)
    everyone = dict(zip(numbers, all_sum(found).cpu(), strict=True))
    for k, (_, losses) in everyone.items():
        row, who = [0.0, float(losses.sum()), 0.0, 0.0], f"hypothesis {k}"
        criterion.check_row(row, "the base net" if k < 0 else who, f"on {len(data)} images")
    return {k: t for k, t in everyone.items() if base or k >= 0}


def _round_sizes(data: ImageData, batch: int) -> list[int]:
    """How many images all ranks together see in each round."""
    shards = [len(data.shard(r, world())) for r in range(world())]
    rounds = range(0, max(shards), batch)
    return [sum(min(batch, max(0, n - first)) for n in shards) for first in rounds]


def read(net: nn.Module, data: Any) -> tuple[ImageData, MaskSet]:
    """The images on the net's device, and a copy of the net's masks."""
    return data_for(net, data), masks(net).copy()


@contextmanager
def prepared(
    net: nn.Module, current: MaskSet, removals: list[Tensor], images: ImageData, engine: Engine,
    criterion: Criterion = DEFAULT, expected: int | None = None, visits: int | None = None,
) -> Iterator[ScoringPlan]:  # fmt: skip
    """The plan, with the net in eval mode; afterwards the net is as it was.

    current: a copy of the net's masks. removals: all, or some that are typical of the
    `expected` number of them. visits: how many of the images each will need, probably. Precision
    is stated here: a caller's autocast has no effect.
    """
    with (
        repeatable_convolutions(), eval_mode(net), ExitStack() as stack,
    ):  # fmt: skip
        stack.callback(set_masks, net, current)
        with own_precision(images.device, "float32"), torch.inference_mode():
            check_scorable(net, images, criterion)
            example = next(images.batches(2, dtype=dtype_of(net)))[0]
            limit = default_memory(example.device) if engine.memory is None else engine.memory
            # Ranks plan alike, whatever memory each of them has.
            limit = int(from_first(torch.tensor(min(limit, 2**62))))
            plan = make_plan(Request(
                net, current, removals, expected or len(removals), visits or len(images),
                example,
                engine.batch_size, limit, engine.precision,
            ), engine.name)  # fmt: skip
        if isinstance(plan.engine, Stacked):
            stack.enter_context(kept_memory())
        stack.enter_context(own_precision(images.device, engine.precision))
        yield plan


def check_scorable(net: nn.Module, images: ImageData, criterion: Criterion = DEFAULT) -> None:
    """An error if this net cannot be scored on these images."""
    if not len(images):
        raise ValueError("there are no images to score on")
    mask_modules(net)  # the first error of a net without masks
    check_metric(net, images, criterion, "the net")


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
