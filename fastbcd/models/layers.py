"""What the networks share: activations by name, checks of sizes, initial weights."""

from __future__ import annotations

from torch import nn

from fastbcd.masking.activations import MaskedActivation, activation_type
from fastbcd.runtime.validate import check_whole


def activation(channels: int, size: int, replacement: str) -> MaskedActivation:
    """A masked activation for [channels, size, size]; cleared bits give `replacement`."""
    return activation_type(replacement)((channels, size, size))


def conv3x3(c_in: int, c_out: int, stride: int = 1) -> nn.Conv2d:
    """[B, c_in, s, s] -> [B, c_out, halved(s, stride), ...]."""
    return nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)


def halved(size: int, stride: int) -> int:
    """The side of an image after a convolution of this stride.

    >>> halved(32, 2), halved(7, 2), halved(7, 1)
    (16, 4, 7)
    """
    return -(-size // stride)


def check_sizes(**sizes: int) -> None:
    """Refuse a size that is not a whole number of at least 1, by its name."""
    for name, value in sizes.items():
        check_whole(name, value, 1)


def initialise(net: nn.Module) -> None:
    """Kaiming's normal distribution (fan out, ReLU) for the convolutions."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
