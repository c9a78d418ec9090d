"""Nets and batches in the style of Hugging Face: outputs with logits, labels=, items as dicts."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fastbcd


@dataclass
class Output(OrderedDict):
    """What transformers' ModelOutput does: a dict of the fields that are not None."""

    loss: Any = None
    logits: Any = None
    features: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16, 3)

    def forward(self, pixel_values=None, labels=None, output_features=None):
        if pixel_values is None:
            raise ValueError("You have to specify pixel_values")
        features = self.body(pixel_values)
        logits = self.head(features)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits, features=features)


X, Y = torch.randn(60, 1, 4, 4), torch.arange(60) % 3


def converted(model=None) -> Any:
    return fastbcd.convert(model or Classifier().eval(), X[:2])


def test_the_output_has_the_type_of_the_original() -> None:
    model = Classifier().eval()
    net = converted(model)
    assert type(pickle.loads(pickle.dumps(net))(X)) is Output
    for one in (net, copy.deepcopy(net)):
        output, expected = one(pixel_values=X, labels=Y), model(X, labels=Y)
        assert type(output) is Output
        assert list(output) == list(expected)
        for name, value in expected.items():
            assert torch.equal(getattr(output, name), value)
        assert one(X).loss is None
    with pytest.raises(TypeError, match=r"torch.float32, not class indices: use output.logits"):
        net(X, labels=torch.rand(60, 3))
    with pytest.raises(TypeError, match="takes no argument labels="):
        fastbcd.convert(nn.Sequential(nn.ReLU()), X)(X, labels=Y)


def test_engines_score_the_logits() -> None:
    net = converted()
    removals = [[0, 5], [3, 9]]
    for engine in ("sequential", "stacked", "collapsed"):
        scores = fastbcd.score(net, removals, (X, Y), engine=engine)
        assert scores.base_correct == int((net(X).logits.argmax(1) == Y).sum())
        expected = fastbcd.score(net, removals, (X, Y), engine="sequential").loss
        torch.testing.assert_close(scores.loss, expected)
    assert fastbcd.accuracy(net, (X, Y)) == pytest.approx(100 * scores.base_correct / 60)


@pytest.mark.parametrize("names", [("pixel_values", "labels"), ("image", "label")])
def test_linearize_takes_nets_with_logits_and_items_that_are_dicts(names, tmp_path) -> None:
    items = [dict(zip(names, pair, strict=True)) for pair in zip(X, Y.tolist(), strict=True)]
    settings = {"epochs": 1, "test": (X, Y), "progress": False}
    data = DataLoader(items, batch_size=8)
    run = fastbcd.linearize(Classifier(), data, 8, run_dir=tmp_path / "run", **settings)
    assert run.masks.count() == 8
    assert type(run.model(X)) is Output
    tuner = fastbcd.Finetuner(run.model, (X, Y), fastbcd.Finetune(epochs=1), teacher=Classifier())
    tuner.run(0)
    with pytest.raises(TypeError, match=r"item 0 .* not .* dict of pixel_values or image and"):
        fastbcd.ImageData.from_dataset([{"x": X[0], "y": 0}])
