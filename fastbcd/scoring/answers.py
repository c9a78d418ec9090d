"""Answers: the one pass over images, of the hypotheses that a call or a step asks about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastbcd.data.images import ImageData
from fastbcd.masking.masks import MaskSet, mask_modules, masks, set_masks
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.limits import default_memory
from fastbcd.runtime.malloc import kept_memory
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.ranks import from_first
from fastbcd.runtime.tf32 import own_precision, repeatable_convolutions
from fastbcd.scoring.accuracy import check_metric, judged
from fastbcd.scoring.confident import Confident
from fastbcd.scoring.engine import Engine, Request
from fastbcd.scoring.exact import Exact
from fastbcd.scoring.metric import DEFAULT, Criterion, at_least_float32
from fastbcd.scoring.mixed import Mixed
from fastbcd.scoring.plan import ScoringPlan, make_plan
from fastbcd.scoring.profile import profile_of
from fastbcd.scoring.stacked import Stacked


class Answers:
    """Runs hypotheses, by number, on ranges of the images; -1 is the base, the net as it is.

    removals: LongTensor[D] by number; the caller may add to it.
    """

    def __init__(
        self,
        plan: ScoringPlan,
        criterion: Criterion,
        data: ImageData,
        removals: dict[int, Tensor],
        order: Tensor,
    ) -> None:
        self.plan = plan
        self.criterion = criterion
        self.data = data
        self.removals = removals
        self.order = order  # in which the images are visited
        self.running: dict[int, Tensor] = {}  # what the engine is prepared for
        self.work: Any = None
        self.mixed: Mixed | None = None
        if plan.request.precision == "mixed":
            self.mixed = Mixed(plan.engine.fast)

    def __call__(self, numbers: list[int], begin: int, end: int) -> dict[int, Tensor]:
        """By number, metric and loss of the visits begin to end, DoubleTensor[2, end - begin]."""
        images = self.order[begin:end]
        if self.mixed is None:
            answers = self.score(numbers, images)
        else:
            answers = self.mixed(self.score, numbers, images)
        return self._checked(numbers, images, answers)

    def in_float32(self, number: int, end: int) -> Tensor:
        """Metric and loss of one hypothesis in the first visits, DoubleTensor[2, end]."""
        images = self.order[:end]
        return self._checked([number], images, self.score([number], images))[number]

    def _checked(
        self, numbers: list[int], images: Tensor, answers: Tensor
    ) -> dict[int, Tensor]:
        by_number = dict(zip(numbers, answers, strict=True))
        for k, answer in by_number.items():
            who = f"hypothesis {k}" if k >= 0 else "the base net"
            self.criterion.check(answer, who, images)
        return by_number

    def score(
        self, numbers: list[int], images: Tensor, precision: str = "float32"
    ) -> Tensor:
        """Metric and loss, DoubleTensor[len(numbers), 2, len(images)]."""
        removals = {k: self.removals[k] for k in numbers if k >= 0}
        if self.work is None or removals.keys() != self.running.keys():
            self._prepare(removals)
        # A hypothesis that removes nothing is the base.
        base = -1 in numbers or not all(ids.numel() for ids in removals.values())

        def judge(x: Tensor, targets: Tensor, images: Tensor) -> Tensor:
            by_number = self._answers(x, targets, base, images)
            return torch.stack(
                [by_number[k if k in by_number else -1] for k in numbers]
            )

        with own_precision(self.data.device, precision):
            return judged(
                self.data,
                images,
                self.plan.batch,
                len(numbers),
                judge,
                dtype=self.plan.request.example.dtype,
                memory_format=self.plan.engine.memory_format,
            )

    def _prepare(self, removals: dict[int, Tensor]) -> None:
        self.running = removals
        self.work = self.plan.engine.prepare(removals, self.plan.lanes)

    def _answers(
        self, x: Tensor, targets: Tensor, base: bool, images: Tensor
    ) -> dict[int, Tensor]:
        """Of one batch; after an out-of-memory error with fewer hypotheses at a time."""
        try:
            answers: dict[int, Tensor] = {}
            for numbers, outputs in self.plan.engine.logits(x, self.work, base, images):
                with torch.autocast(x.device.type, enabled=False):  # that of bf16
                    outputs = tree_map_only(Tensor, at_least_float32, outputs)
                    each = self.criterion.each(outputs, targets)
                answers.update(zip(numbers, each, strict=True))
            return answers
        except torch.OutOfMemoryError as error:
            self.plan.use_fewer_lanes(len(self.running), error)
        self._prepare(self.running)
        return self._answers(x, targets, base, images)


@contextmanager
def prepared(
    net: nn.Module,
    removals: dict[int, Tensor],
    images: ImageData,
    engine: Engine,
    criterion: Criterion = DEFAULT,
    decision: Exact | Confident | None = None,
    *,
    expected: int | None = None,
) -> Iterator[Answers]:
    """Answers of a net that is in eval mode; afterwards the net is as it was.

    removals: all, or some that are typical of the `expected` number of them. decision: what will
    be asked; None: all images in their order. Precision is stated here: a caller's autocast has no
    effect.
    """
    current = masks(net).copy()
    decision = decision or Exact(criterion, len(images), adt=0.0)
    profile = profile_of(images.device)
    with repeatable_convolutions(), eval_mode(net), ExitStack() as stack:
        stack.callback(set_masks, net, current)
        with own_precision(images.device, "float32"), torch.inference_mode():
            check_scorable(net, images, criterion)
            example = next(images.batches(2, dtype=dtype_of(net)))[0]
            memory = engine.memory or default_memory(example.device)
            request = Request(
                net,
                current,
                [*removals.values()],
                hypotheses=expected or len(removals),
                images=decision.needed,
                example=example,
                batch_size=engine.batch_size,
                # Ranks plan alike, whatever memory each of them has.
                memory=int(from_first(torch.tensor(min(memory, 2**62)))),
                precision=_precision(engine, example, criterion),
                profile=profile,
            )
            plan = make_plan(request, engine.name)
        if isinstance(plan.engine, Stacked):
            stack.enter_context(kept_memory())
        if isinstance(decision, Exact):
            decision.batch = plan.together
        yield Answers(plan, criterion, images, removals, decision.order)


def _precision(engine: Engine, example: Tensor, criterion: Criterion) -> str:
    if example.dtype != torch.float32 or criterion.metric is not None:
        return "float32"
    by_default = {"cuda": "mixed"}.get(example.device.type, "float32")
    return engine.precision or by_default


def check_scorable(
    net: nn.Module, images: ImageData, criterion: Criterion = DEFAULT
) -> None:
    """An error if this net cannot be scored on these images."""
    mask_modules(net)  # the first error of a net without masks
    check_metric(net, images, criterion, "the net")


def checked_removal(current: MaskSet, removal: Tensor, number: int) -> Tensor:
    """A LongTensor of distinct kept ids."""
    try:
        ids = current.check_kept(torch.as_tensor(removal))
    except (ValueError, IndexError, TypeError) as error:
        raise type(error)(f"hypothesis {number}: {error}") from None
    if ids.ndim != 1:
        raise ValueError(
            f"hypothesis {number} has shape {tuple(ids.shape)}; expected [D]: D ids"
        )
    if len(ids.unique()) != len(ids):
        raise ValueError(f"hypothesis {number} names a ReLU twice")
    return ids
