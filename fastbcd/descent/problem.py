"""Problem: the net and the images that a run is about, and what its answers are judged by."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastbcd.data.for_net import data_for
from fastbcd.data.images import ImageData
from fastbcd.scoring.accuracy import accuracy, check_answers, check_metric
from fastbcd.scoring.answers import check_scorable
from fastbcd.scoring.metric import Criterion

FEW = 32  # images that the net is asked about after every step


class Problem:
    """What is linearised, trained on, scored on and tested on; checked when it is made."""

    def __init__(
        self,
        net: nn.Module,
        data: Any,
        test: Any,
        criterion: Criterion,
        samples: int | None,
    ) -> None:
        check_net("net", net)
        self.net = net
        self.criterion = criterion
        self.train = data_for(net, data)
        check_scorable(net, self.train, criterion)
        if samples is not None and samples > len(self.train):
            raise ValueError(
                f"samples={samples}; there are {len(self.train)} train images"
            )
        self.scored = self.train.first(samples or len(self.train))
        self.test: ImageData | None = None
        if test is not None:
            self.test = data_for(net, test)
            check_metric(
                net, self.test, criterion, "the net, asked about the test set,"
            )

    def accuracy(self) -> float | None:
        """The test accuracy of the net as it is; None without test data."""
        if self.test is None:
            return None
        return self.accuracy_on(self.test)

    def check_outputs(self) -> None:
        """Refuse a net whose outputs for the first images are not valid."""
        few = self.scored.first(min(FEW, len(self.scored)))
        check_answers(self.net, few, self.criterion, "the net")

    def accuracy_on(self, images: ImageData) -> float:
        """The accuracy of the net as it is, on some images."""
        return accuracy(self.net, images, metric=self.criterion.metric)

    @property
    def unit(self) -> str:
        """Of accuracies, as text."""
        return "" if self.criterion.bounds is None else " %"


def check_net(name: str, net: Any) -> None:
    """Refuse what is no network."""
    if not isinstance(net, nn.Module):
        kind = f"a {type(net).__name__}"
        if isinstance(net, type):
            kind = f"the class {net.__name__}"
        raise TypeError(f"{name} is {kind}; give a torch.nn.Module")
