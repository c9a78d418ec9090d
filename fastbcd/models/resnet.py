"""ResNets for small images, on masked activations, with SNL's names of weights and sites.

    ResNet:      block(x) = alpha2(bn2(conv2(y)) + shortcut(x)),  y = alpha1(bn1(conv1(x)))
    WideResNet:  block(x) = conv2(alpha2(bn2(conv1(a)))) + (x, or convShortcut(a) where the shape
                 changes),  a = alpha1(bn1(x))

Such names are layer2.0.conv1.weight, layer2.0.alpha1.mask, block1.layer.0.convShortcut.weight. A
ReLU after the stem of a ResNet, or at the end of a WideResNet, is the site `alpha`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fastbcd.masking.activations import MaskedActivation, activation_type
from fastbcd.runtime.validate import check_whole


class PadShortcut(nn.Module):
    """Every second pixel, with zeros for the channels that are new (He et al., option A)."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        before = (c_out - c_in) // 2
        self.stride, self.padding = stride, (0, 0, 0, 0, before, c_out - c_in - before)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, c_in, s, s] -> [B, c_out, halved(s), halved(s)]."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], self.padding)


def _projection(c_in: int, c_out: int, stride: int) -> nn.Sequential:
    """A 1×1 convolution and a batch norm (option B)."""
    return nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))


_SHORTCUTS: dict[str, Any] = {"projection": _projection, "pad": PadShortcut}


def _conv3x3(c_in: int, c_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)


def _activation(channels: int, size: int, replacement: str) -> MaskedActivation:
    return activation_type(replacement)((channels, size, size))


def halved(size: int, stride: int = 2) -> int:
    """The side of an image after a convolution of this stride.

    >>> halved(32), halved(7), halved(7, 1)
    (16, 4, 7)
    """
    return -(-size // stride)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut; `size` is the side of its input."""

    def __init__(
        self, c_in: int, c_out: int, *, stride: int, size: int, shortcut: str, replacement: str
    ) -> None:
        super().__init__()
        size = halved(size, stride)
        self.conv1 = _conv3x3(c_in, c_out, stride)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.alpha1 = _activation(c_out, size, replacement)
        self.conv2 = _conv3x3(c_out, c_out)
        self.bn2 = nn.BatchNorm2d(c_out)
        same = stride == 1 and c_in == c_out
        self.shortcut = nn.Sequential() if same else _SHORTCUTS[shortcut](c_in, c_out, stride)
        self.alpha2 = _activation(c_out, size, replacement)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, c_in, s, s] -> [B, c_out, halved(s), halved(s)]."""
        y = self.alpha1(self.bn1(self.conv1(x)))
        return self.alpha2(self.bn2(self.conv2(y)) + self.shortcut(x))


class WideBlock(nn.Module):
    """Two activated 3×3 convolutions, added to the input or to a 1×1 convolution of it."""

    def __init__(self, c_in: int, c_out: int, *, stride: int, size: int, replacement: str) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(c_in)
        self.alpha1 = _activation(c_in, size, replacement)
        self.conv1 = _conv3x3(c_in, c_out, stride)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.alpha2 = _activation(c_out, halved(size, stride), replacement)
        self.conv2 = _conv3x3(c_out, c_out)
        self.convShortcut = None
        if stride > 1 or c_in != c_out:
            self.convShortcut = nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, c_in, s, s] -> [B, c_out, halved(s), halved(s)]."""
        a = self.alpha1(self.bn1(x))
        y = self.conv2(self.alpha2(self.bn2(self.conv1(a))))
        return y + (x if self.convShortcut is None else self.convShortcut(a))


class _StagedNet(nn.Module):
    """Stages of blocks: the first keeps the image's size, each further one halves it."""

    arch: dict[str, Any] | None = None  # how a function of fastbcd.models built it

    def _check(self, **sizes: int) -> None:
        for name, value in sizes.items():
            check_whole(name, value, 1)

    def _stages(
        self, block: type[nn.Module], widths: Sequence[int], *, blocks: int, channels: int,
        size: int, **options: Any,
    ) -> tuple[list[nn.Sequential], int, int]:  # fmt: skip
        """One stage for each width; the channels and the side of the image after the last."""
        stages = []
        for i, width in enumerate(widths):
            parts = []
            for stride in [2 if i else 1] + [1] * (blocks - 1):
                parts.append(block(channels, width, stride=stride, size=size, **options))
                channels, size = width, halved(size, stride)
            stages.append(nn.Sequential(*parts))
        return stages, channels, size

    def _initialise(self) -> None:
        """Kaiming's normal distribution (fan out, ReLU) for the convolutions."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ResNet(_StagedNet):
    """A 3×3 stem, one stage of basic blocks for each width, the mean over pixels, a linear layer.

    The first stage keeps the image's size, each further one halves it.

    >>> net = ResNet([4, 8], blocks=1, num_classes=3, image_size=8)
    >>> net(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 3])
    >>> list(fastbcd.masks(net).counts())
    ['layer1.0.alpha1', 'layer1.0.alpha2', 'layer2.0.alpha1', 'layer2.0.alpha2']
    """

    def __init__(
        self, widths: Sequence[int], blocks: int, num_classes: int, image_size: int,
        in_channels: int = 3, *, stem_relu: bool = False, shortcut: str = "projection",
        replacement: str = "identity",
    ) -> None:  # fmt: skip
        super().__init__()
        named = {f"widths[{i}]": width for i, width in enumerate(widths)}
        self._check(blocks=blocks, num_classes=num_classes, image_size=image_size,
                    in_channels=in_channels, **named)  # fmt: skip
        if shortcut not in _SHORTCUTS:
            raise ValueError(f"shortcut={shortcut!r}; choose from {sorted(_SHORTCUTS)}")
        self.conv1 = _conv3x3(in_channels, widths[0])
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.alpha = _activation(widths[0], image_size, replacement) if stem_relu else nn.Identity()
        stages, channels, _ = self._stages(
            BasicBlock, widths, blocks=blocks, channels=widths[0], size=image_size,
            shortcut=shortcut, replacement=replacement,
        )  # fmt: skip
        self.stages = [f"layer{i + 1}" for i in range(len(widths))]
        for name, stage in zip(self.stages, stages, strict=True):
            self.add_module(name, stage)
        self.linear = nn.Linear(channels, num_classes)
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in_channels, image_size, image_size] -> logits [B, num_classes]."""
        x = self.alpha(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return self.linear(x.mean((2, 3)))


class WideResNet(_StagedNet):
    """A 3×3 stem of 16 channels and three groups of 16, 32, 64 times `factor` channels.

    depth = 6·blocks + 4.

    >>> net = WideResNet(10, 1, num_classes=3, image_size=8)
    >>> net(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self, depth: int, factor: int, num_classes: int, image_size: int, in_channels: int = 3,
        *, final_relu: bool = False, replacement: str = "identity",
    ) -> None:  # fmt: skip
        super().__init__()
        self._check(depth=depth, factor=factor, num_classes=num_classes, image_size=image_size,
                    in_channels=in_channels)  # fmt: skip
        blocks, odd = divmod(depth - 4, 6)
        if odd or blocks < 1:
            raise ValueError(f"depth={depth}; a wide ResNet has 6·blocks + 4 layers: 10, 16, 22, …")
        self.conv1 = _conv3x3(in_channels, 16)
        stages, channels, size = self._stages(
            WideBlock, [16 * factor, 32 * factor, 64 * factor], blocks=blocks,
            channels=16, size=image_size, replacement=replacement,
        )  # fmt: skip
        # SNL has the blocks of a group behind the name `layer`.
        self.block1, self.block2, self.block3 = (
            nn.Sequential(OrderedDict(layer=stage)) for stage in stages
        )
        self.bn1 = nn.BatchNorm2d(channels)
        self.alpha = _activation(channels, size, replacement) if final_relu else nn.Identity()
        self.fc = nn.Linear(channels, num_classes)
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in_channels, image_size, image_size] -> logits [B, num_classes]."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        return self.fc(self.alpha(self.bn1(x)).mean((2, 3)))
