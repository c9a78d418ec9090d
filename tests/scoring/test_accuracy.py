"""accuracy: that of one image at a time."""

from __future__ import annotations

import copy

import pytest
import torch

from fastbcd.scoring.accuracy import accuracy
from helpers.nets import images, make
from helpers.train_cases import assert_same, pair, weights


@pytest.mark.parametrize("name", ["resnet", "sizes"])
def test_accuracy(name) -> None:
    net, (x, labels) = make(name).train(), images(37)
    with torch.no_grad():
        correct = sum(
            int((copy.deepcopy(net).eval()(x[i : i + 1]).argmax(1) == labels[i]).sum())
            for i in range(37)
        )
    before = weights(net)
    assert accuracy(net, (x, labels), batch_size=10) == pytest.approx(100 * correct / 37)
    assert net.training
    assert_same(before, weights(net))
    with pytest.raises(ValueError, match="no images"):
        accuracy(net, pair().first(0))


def test_invalid_outputs_are_refused() -> None:
    """NaN logits of one late image, and a metric beyond its bounds."""
    net, (x, labels) = make("resnet"), images(37)

    def metric(outputs, targets):
        return (outputs.argmax(1) == targets) + 2.0 * (targets == 7)

    metric.bounds = (0, 1)
    late = torch.where(torch.arange(37) == 30, 7, labels)
    with pytest.raises(ValueError, match=r"the metric returns [23] for image 30 and the net"):
        accuracy(net, (x, late), metric=metric)
    x[30] = torch.inf
    with pytest.raises(FloatingPointError, match="the net gives NaN logits for image 30"):
        accuracy(net, (x, labels), batch_size=10)
