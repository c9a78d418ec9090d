"""ResNets for small images, on masked activations, with SNL's names of weights and sites.

Such names are layer2.0.conv1.weight, layer2.0.alpha1.mask, block1.layer.0.convShortcut.weight. A
ReLU after the stem of a ResNet, or at the end of a WideResNet, is the site `alpha`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fastbcd.masking.activations import MaskedActivation, activation_type
from fastbcd.runtime.validate import check_whole

Activation = type[MaskedActivation]


class PadShortcut(nn.Module):
    """Every second pixel, with zeros for the channels that are new (He et al., option A)."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        before = (c_out - c_in) // 2
        after = c_out - c_in - before
        self.stride = stride
        self.padding = (0, 0, 0, 0, before, after)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, c_in, s, s] -> [B, c_out, s/stride, s/stride]."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], self.padding)


def _conv3x3(c_in: int, c_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)


class BasicBlock(nn.Module):
    """alpha2(bn2(conv2(alpha1(bn1(conv1(x))))) + shortcut(x)); `size` is the side of x."""

    def __init__(
        self,
        c_in: int,
        c_out: int,
        *,
        stride: int,
        size: int,
        act: Activation,
        pad: bool,
    ) -> None:
        super().__init__()
        size = math.ceil(size / stride)
        self.conv1 = _conv3x3(c_in, c_out, stride)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.alpha1 = act((c_out, size, size))
        self.conv2 = _conv3x3(c_out, c_out)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.shortcut: nn.Module = nn.Sequential()
        if stride > 1 or c_in != c_out:
            if pad:
                self.shortcut = PadShortcut(c_in, c_out, stride)
            else:
                convolution = nn.Conv2d(c_in, c_out, 1, stride, bias=False)
                self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(c_out))
        self.alpha2 = act((c_out, size, size))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, c_in, s, s] -> [B, c_out, s/stride, s/stride]."""
        y = self.alpha1(self.bn1(self.conv1(x)))
        return self.alpha2(self.bn2(self.conv2(y)) + self.shortcut(x))


class WideBlock(nn.Module):
    """conv2(alpha2(bn2(conv1(a)))) + (x or convShortcut(a)), a = alpha1(bn1(x))."""

    def __init__(
        self, c_in: int, c_out: int, *, stride: int, size: int, act: Activation
    ) -> None:
        super().__init__()
        smaller = math.ceil(size / stride)
        self.bn1 = nn.BatchNorm2d(c_in)
        self.alpha1 = act((c_in, size, size))
        self.conv1 = _conv3x3(c_in, c_out, stride)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.alpha2 = act((c_out, smaller, smaller))
        self.conv2 = _conv3x3(c_out, c_out)
        self.convShortcut = None
        if stride > 1 or c_in != c_out:
            self.convShortcut = nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, c_in, s, s] -> [B, c_out, s/stride, s/stride]."""
        a = self.alpha1(self.bn1(x))
        y = self.conv2(self.alpha2(self.bn2(self.conv1(a))))
        if self.convShortcut is None:
            return y + x
        return y + self.convShortcut(a)


def _stages(
    block: Callable[..., nn.Module],
    widths: Sequence[int],
    *,
    blocks: int,
    channels: int,
    size: int,
    **options: Any,
) -> tuple[list[nn.Sequential], int]:
    """One stage for each width; the side of the image after the last."""
    stages: list[nn.Sequential] = []
    for width in widths:
        stage = nn.Sequential()
        for number in range(blocks):
            stride = 1
            if stages and number == 0:
                stride = 2
            stage.append(block(channels, width, stride=stride, size=size, **options))
            channels = width
            size = math.ceil(size / stride)
        stages.append(stage)
    return stages, size


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        check_whole(name, value, 1)


def _initialise(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ResNet(nn.Module):
    """A 3×3 stem, one stage of basic blocks for each width, the mean over pixels, a linear layer.

    The first stage keeps the image's size, each further one halves it.

    >>> net = ResNet([4, 8], blocks=1, num_classes=3, image_size=8)
    >>> net(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 3])
    >>> list(fastbcd.masks(net).counts())
    ['layer1.0.alpha1', 'layer1.0.alpha2', 'layer2.0.alpha1', 'layer2.0.alpha2']
    """

    arch: dict[str, Any] | None = None  # how a function of fastbcd.models built it

    def __init__(
        self,
        widths: Sequence[int],
        blocks: int,
        num_classes: int,
        image_size: int,
        in_channels: int = 3,
        *,
        stem_relu: bool = False,
        shortcut: str = "projection",
        replacement: str = "identity",
    ) -> None:
        super().__init__()
        _check_sizes(
            blocks=blocks,
            num_classes=num_classes,
            image_size=image_size,
            in_channels=in_channels,
            **{f"widths[{number}]": width for number, width in enumerate(widths)},
        )
        if shortcut not in ("pad", "projection"):
            raise ValueError(
                f"shortcut={shortcut!r}; choose from ['pad', 'projection']"
            )
        act = activation_type(replacement)
        stem = widths[0]
        self.conv1 = _conv3x3(in_channels, stem)
        self.bn1 = nn.BatchNorm2d(stem)
        self.alpha: nn.Module = nn.Identity()
        if stem_relu:
            self.alpha = act((stem, image_size, image_size))
        stages, _ = _stages(
            BasicBlock,
            widths,
            blocks=blocks,
            channels=stem,
            size=image_size,
            act=act,
            pad=shortcut == "pad",
        )
        self.stages = [f"layer{number}" for number in range(1, len(stages) + 1)]
        for name, stage in zip(self.stages, stages, strict=True):
            self.add_module(name, stage)
        self.linear = nn.Linear(widths[-1], num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in_channels, image_size, image_size] -> logits [B, num_classes]."""
        x = self.alpha(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return self.linear(x.mean((2, 3)))


class WideResNet(nn.Module):
    """A 3×3 stem of 16 channels and three groups of 16, 32, 64 times `factor` channels.

    depth = 6·blocks + 4.

    >>> net = WideResNet(10, 1, num_classes=3, image_size=8)
    >>> net(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 3])
    """

    arch: dict[str, Any] | None = None  # how a function of fastbcd.models built it

    def __init__(
        self,
        depth: int,
        factor: int,
        num_classes: int,
        image_size: int,
        in_channels: int = 3,
        *,
        final_relu: bool = False,
        replacement: str = "identity",
    ) -> None:
        super().__init__()
        _check_sizes(
            depth=depth,
            factor=factor,
            num_classes=num_classes,
            image_size=image_size,
            in_channels=in_channels,
        )
        blocks, odd = divmod(depth - 4, 6)
        if odd or blocks < 1:
            raise ValueError(
                f"depth={depth}; a wide ResNet has 6·blocks + 4 layers: 10, 16, 22, …"
            )
        act = activation_type(replacement)
        widths = [16 * factor, 32 * factor, 64 * factor]
        self.conv1 = _conv3x3(in_channels, 16)
        stages, size = _stages(
            WideBlock, widths, blocks=blocks, channels=16, size=image_size, act=act
        )
        # SNL has the blocks of a group behind the name `layer`.
        self.block1, self.block2, self.block3 = (
            nn.Sequential(OrderedDict(layer=stage)) for stage in stages
        )
        self.bn1 = nn.BatchNorm2d(widths[-1])
        self.alpha: nn.Module = nn.Identity()
        if final_relu:
            self.alpha = act((widths[-1], size, size))
        self.fc = nn.Linear(widths[-1], num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in_channels, image_size, image_size] -> logits [B, num_classes]."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        return self.fc(self.alpha(self.bn1(x)).mean((2, 3)))
