"""The accuracy of a network, and the checks that its outputs fit the labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastbcd.data.for_net import data_for
from fastbcd.data.images import ImageData
from fastbcd.graph.fuse import fused
from fastbcd.graph.trace import logits_of
from fastbcd.masking.calls import calls_checked
from fastbcd.masking.convert import unwrap
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.module_mode import eval_mode
from fastbcd.runtime.ranks import all_sum, rank, world
from fastbcd.scoring.metric import Criterion, Metric, describe

Judge = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # (images, targets, positions) -> answers


def accuracy(
    net: nn.Module, data: Any, batch_size: int = 500, *, metric: Metric | None = None
) -> float:
    """The percentage of images whose largest logit is that of their label, in eval mode.

    metric: as in `fastbcd.score`. Returned is its mean, in percent of its range if it has bounds.
    With several ranks each measures its part of the data, and all return the same number.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> 0.0 <= accuracy(net, (torch.randn(8, 1, 2, 2), torch.arange(8) % 3)) <= 100.0
    True
    """
    net = unwrap(net)
    images = data_for(net, data)
    criterion = Criterion(metric, loss=metric)  # a loss is not needed
    everything = torch.arange(len(images))
    with torch.autocast(images.device.type, enabled=False):
        check_metric(net, images, criterion, "the net")
        model, layout = fused(net, train=False)

        def judge(x: Tensor, targets: Tensor, _: Tensor) -> Tensor:
            return criterion.each(_one(model.eval()(x)), targets)

        with eval_mode(net):
            options = {"dtype": dtype_of(net), "memory_format": layout}
            (answers,) = judged(images, everything, batch_size, 1, judge, **options)
    criterion.check(answers, "the net", everything)
    return criterion.percent(criterion.sums(answers)[0], len(images))


def judged(
    data: ImageData,
    positions: Tensor,
    batch_size: int,
    count: int,
    judge: Judge,
    **options: Any,
) -> Tensor:
    """What `judge` makes of the images at these positions, DoubleTensor[count, 2, N] on the CPU.

    Each rank runs a part of the images; all ranks get all answers. options: of `data.batches`.
    """
    total = len(positions)
    answers = torch.zeros(count, 2, total, dtype=torch.float64, device=data.device)
    begin = rank() * total // world()
    end = (rank() + 1) * total // world()
    mine = positions[begin:end]
    batches = data.batches(batch_size, mine.to(data.device), **options)
    with torch.inference_mode():
        parts = [
            judge(x, targets, part)
            for (x, targets), part in zip(batches, mine.split(batch_size), strict=False)
        ]
        if parts:
            answers[:, :, begin:end] = torch.cat(parts, 2)
    return all_sum(answers).cpu()


def check_metric(
    net: nn.Module, data: ImageData, criterion: Criterion, who: str
) -> None:
    """Refuse a net whose outputs do not fit the metric and the loss."""
    if criterion.metric is None:
        check_classes(net, data, who)
        if criterion.loss is None:
            return
    criterion.check_targets(first_outputs(net, data, who, 2), data.labels, who)
    check_answers(net, data.first(min(2, len(data))), criterion, who)


def check_answers(
    net: nn.Module, data: ImageData, criterion: Criterion, who: str
) -> None:
    """Refuse a net whose answers to a batch of images are not valid."""
    targets = next(data.batches(len(data), dtype=dtype_of(net)))[1]
    outputs = first_outputs(net, data, who, len(data))
    with torch.inference_mode():
        (answers,) = criterion.each(_one(outputs), targets)
    criterion.check(answers, who, torch.arange(len(targets)))


def check_classes(net: nn.Module, data: ImageData, who: str) -> int:
    """The number of logits of `who` for one image; refuses labels that are out of range."""
    logits = first_outputs(net, data, who, 1)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 1:
        raise ValueError(
            f"{who} must return logits [B, classes], unless metric= is given; for one image it "
            f"returns {describe(logits)}"
        )
    data.need_classes(f"the accuracy of {who}")
    data.check_labels(logits.shape[1], who)
    return logits.shape[1]


def first_outputs(net: nn.Module, data: ImageData, who: str, n: int) -> Any:
    """What `who` returns for the first n images, in eval mode."""
    for tensor in (*net.parameters(), *net.buffers())[:1]:
        if tensor.device != data.device:
            raise ValueError(
                f"the data is on {data.device} and {who} on {tensor.device}; move one of them "
                f"with .to(device)"
            )
    with calls_checked(net):
        try:
            with eval_mode(net), torch.inference_mode():
                return logits_of(net(next(data.batches(n, dtype=dtype_of(net)))[0]))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            problem = str(error).partition("\n")[0] or type(error).__name__
            hint = ""
            if data.images.ndim == 3:
                hint = "; give grey images as images.unsqueeze(1)"
            shape = list(data.images.shape[1:])
            raise ValueError(
                f"{who} does not run on images of shape {shape}: {problem}{hint}"
            ) from error


def _one(outputs: Any) -> Any:
    """The outputs of a net as those of one hypothesis, [1, B, ...]."""
    return tree_map_only(Tensor, lambda t: t.unsqueeze(0), outputs)
