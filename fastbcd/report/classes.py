"""The accuracy of each class, of a net and of the net that it was before."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbcd.data.for_net import data_for
from fastbcd.graph.trace import logits_of
from fastbcd.runtime.dtypes import dtype_of
from fastbcd.runtime.module_mode import eval_mode

BATCH = 256


class ClassAccuracy(NamedTuple):
    """A class of the test set; accuracies in percent, the one before only if it is known."""

    name: str
    images: int
    now: float
    before: float | None = None


def class_accuracies(
    net: nn.Module, test: Any, before: nn.Module | None = None
) -> list[ClassAccuracy]:
    """The classes that have test images, the rarest first.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(2))
    >>> test = torch.eye(2).view(2, 1, 1, 2).repeat(3, 1, 1, 1), torch.tensor([0, 1, 0, 1, 0, 0])
    >>> for row in class_accuracies(net, test):
    ...     print(row)
    ClassAccuracy(name='class 1', images=2, now=100.0, before=None)
    ClassAccuracy(name='class 0', images=4, now=75.0, before=None)
    """
    images, right = _right(net, test)
    rates = 100 * right / images.clamp(min=1)
    earlier: list[Any] = [None] * len(images)
    if before is not None:
        earlier = (100 * _right(before, test)[1] / images.clamp(min=1)).tolist()
    rows = [
        ClassAccuracy(f"class {number}", int(count), float(rate), previous)
        for number, (count, rate, previous) in enumerate(
            zip(images, rates, earlier, strict=True)
        )
    ]
    return sorted((row for row in rows if row.images), key=lambda row: row.images)


def _right(net: nn.Module, test: Any) -> tuple[Tensor, Tensor]:
    """How many images each class has, and how many of them the net names rightly."""
    data = data_for(net, test)
    labels = []
    answers = []
    with eval_mode(net), torch.inference_mode():
        for x, y in data.batches(BATCH, dtype=dtype_of(net)):
            answers.append(logits_of(net(x)).argmax(1).cpu())
            labels.append(y.cpu())
    truth = torch.cat(labels)
    right = truth[torch.cat(answers) == truth]
    images = truth.bincount()
    return images, right.bincount(minlength=len(images))
