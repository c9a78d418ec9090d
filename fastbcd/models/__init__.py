"""The networks of the paper, built on masked activations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from torch import nn

from fastbcd.models.resnet import ResNet, WideResNet

NAMES = ("resnet18", "resnet20", "wide_resnet22_8")
__all__ = ["NAMES", "ResNet", "WideResNet", "build", *NAMES]
P = ParamSpec("P")
Net = TypeVar("Net", ResNet, WideResNet)


def build(
    name: str,
    num_classes: int,
    image_size: int,
    *,
    in_channels: int = 3,
    **options: Any,
) -> nn.Module:
    """A network by its name; `options` go to the function of that name.

    Every net from here has `net.arch`, a dict of plain values from which `build` makes another.

    >>> type(build("resnet20", num_classes=10, image_size=28, in_channels=1, width=4)).__name__
    'ResNet'
    >>> build(**resnet20(width=4).arch).arch["width"]
    4
    """
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"there is no network {name!r}; {hint}choose from {', '.join(NAMES)}"
        )
    return globals()[name](num_classes, image_size, in_channels=in_channels, **options)


def recorded(function: Callable[P, Net]) -> Callable[P, Net]:
    """The nets of the function have `arch`: its name, and all of its arguments."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def built(*args: P.args, **options: P.kwargs) -> Net:
        call = signature.bind(*args, **options)
        call.apply_defaults()
        net = function(*args, **options)
        net.arch = {"name": function.__name__, **call.arguments}
        return net

    return built


@recorded
def resnet18(
    num_classes: int = 10,
    image_size: int = 32,
    in_channels: int = 3,
    *,
    width: int = 64,
    stem_relu: bool = False,
    replacement: str = "identity",
) -> ResNet:
    """SNL's ResNet18: no max-pool, no stem ReLU; 491,520 ReLUs at 32×32, 1,966,080 at 64×64.

    stem_relu=True adds a ReLU after the stem: 557,056 at 32×32. width: channels of the first
    stage. replacement: what a cleared bit gives, "identity", "line" or "poly".

    >>> with torch.device("meta"):
    ...     net = resnet18(num_classes=100)
    >>> sum(module.mask.numel() for module in net.modules() if hasattr(module, "mask"))
    491520
    """
    return ResNet(
        widths=[width, 2 * width, 4 * width, 8 * width],
        blocks=2,
        num_classes=num_classes,
        image_size=image_size,
        in_channels=in_channels,
        stem_relu=stem_relu,
        replacement=replacement,
    )


@recorded
def resnet20(
    num_classes: int = 10,
    image_size: int = 32,
    in_channels: int = 3,
    *,
    width: int = 16,
    blocks: int = 3,
    replacement: str = "identity",
) -> ResNet:
    """The ResNet-20 of He et al. for CIFAR, with padded shortcuts: 188,416 ReLUs at 32×32.

    blocks: per stage, of three stages; 1 gives a ResNet-8, 9 a ResNet-56.

    >>> fastbcd.masks(resnet20()).count()
    188416
    """
    return ResNet(
        widths=[width, 2 * width, 4 * width],
        blocks=blocks,
        num_classes=num_classes,
        image_size=image_size,
        in_channels=in_channels,
        stem_relu=True,
        shortcut="pad",
        replacement=replacement,
    )


@recorded
def wide_resnet22_8(
    num_classes: int = 10,
    image_size: int = 32,
    in_channels: int = 3,
    *,
    factor: int = 8,
    final_relu: bool = False,
    replacement: str = "identity",
) -> WideResNet:
    """SNL's Wide-ResNet-22-8: 1,359,872 ReLUs at 32×32, 5,439,488 at 64×64.

    final_relu=True adds a ReLU after the last batch norm, as the original has it: 1,392,640 at
    32×32. factor: 8 widens a ResNet of 16, 32, 64 channels eightfold.

    >>> with torch.device("meta"):
    ...     net = wide_resnet22_8(num_classes=100)
    >>> sum(module.mask.numel() for module in net.modules() if hasattr(module, "mask"))
    1359872
    """
    return WideResNet(
        depth=22,
        factor=factor,
        num_classes=num_classes,
        image_size=image_size,
        in_channels=in_channels,
        final_relu=final_relu,
        replacement=replacement,
    )
