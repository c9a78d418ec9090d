"""Which engines of private inference are installed here, and a small net for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd.private.running import interpreter_of


def need(engine: str) -> None:
    """Skip the test, with the commands that install the engine, where it is missing."""
    try:
        interpreter_of(engine, None)
    except ImportError as error:
        pytest.skip(str(error))


def small_net(replacement: str = "line", relus: int = 40) -> nn.Module:
    """A ResNet-8 of 8×8 images with a few ReLUs and lines or quadratics of some size."""
    torch.manual_seed(0)
    net = fastbcd.models.resnet20(5, 8, width=4, blocks=1, replacement=replacement)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    masks = fastbcd.masks(net)
    drop = masks.sample(masks.count() - relus, seed=0, step=0, trial=0)
    fastbcd.set_masks(net, masks.without(drop))
    for module in net.modules():
        if hasattr(module, "coef"):
            nn.init.normal_(module.coef, 0.3, 0.1)
            module.coef.data[2:] *= 0.1
    return net.eval()
