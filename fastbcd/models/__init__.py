"""The networks of the paper, built on masked activations.

net = fastbcd.models.resnet18(num_classes=100, image_size=32)
net = fastbcd.models.build("wide_resnet22_8", num_classes=200, image_size=64)
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from torch import nn

from fastbcd.models.resnet import ResNet, resnet18, resnet20
from fastbcd.models.wide_resnet import WideResNet, wide_resnet22_8

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet20": resnet20,
    "wide_resnet22_8": wide_resnet22_8,
}
NAMES = tuple(_BUILDERS)

__all__ = ["NAMES", "ResNet", "WideResNet", "build", "resnet18", "resnet20", "wide_resnet22_8"]


def build(
    name: str, num_classes: int, image_size: int, *, in_channels: int = 3, **options: Any
) -> nn.Module:
    """A network by its name; `options` go to the function of that name.

    Every net from here has `net.arch`, a dict of plain values from which `build` makes another.

    >>> type(build("resnet20", num_classes=10, image_size=28, in_channels=1, width=4)).__name__
    'ResNet'
    >>> build(**resnet20(width=4).arch).arch["width"]
    4
    """
    if name not in _BUILDERS:
        near = get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no network {name!r}; {hint}choose from {', '.join(NAMES)}")
    return _BUILDERS[name](num_classes, image_size, in_channels=in_channels, **options)
