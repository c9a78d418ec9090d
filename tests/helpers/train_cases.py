"""What the tests of training share: data, settings, weights to compare."""

from __future__ import annotations

import torch
from torch import nn

import fastbcd
from fastbcd import Finetune, ImageData
from helpers.nets import images

SMALL = Finetune(epochs=2, lr=0.05, batch_size=16, padding=1)


def pair(n: int = 40, seed: int = 0) -> ImageData:
    return fastbcd.data.sources.as_data(images(n, seed))


def weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in net.state_dict().items()}


def assert_same(one: dict, other: dict) -> None:
    for name in one:
        assert torch.equal(one[name], other[name]), name
