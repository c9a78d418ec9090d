"""ResNets for small images, on masked activations: ResNet18 as SNL has it, and ResNet-20.

    y = alpha1(bn1(conv1(x)))
    block(x) = alpha2(bn2(conv2(y)) + shortcut(x))

Names of weights and sites are SNL's: layer2.0.conv1.weight, layer2.0.alpha1.mask. A stem ReLU,
where there is one, is the site `alpha`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fastbcd.models.layers import activation, check_sizes, conv3x3, halved, initialise


class PadShortcut(nn.Module):
    """Every second pixel, with zeros for the channels that are new (He et al., option A)."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        before = (c_out - c_in) // 2
        self.stride, self.padding = stride, (0, 0, 0, 0, before, c_out - c_in - before)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, c_in, s, s] -> [B, c_out, halved(s), halved(s)]."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], self.padding)


def projection(c_in: int, c_out: int, stride: int) -> nn.Sequential:
    """A 1×1 convolution and a batch norm (option B)."""
    return nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))


SHORTCUTS = {"projection": projection, "pad": PadShortcut}


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut; `size` is the side of its input."""

    def __init__(
        self, c_in: int, c_out: int, *, stride: int, size: int, shortcut: str, replacement: str
    ) -> None:
        super().__init__()
        size = halved(size, stride)
        self.conv1 = conv3x3(c_in, c_out, stride)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.alpha1 = activation(c_out, size, replacement)
        self.conv2 = conv3x3(c_out, c_out)
        self.bn2 = nn.BatchNorm2d(c_out)
        same = stride == 1 and c_in == c_out
        self.shortcut = nn.Sequential() if same else SHORTCUTS[shortcut](c_in, c_out, stride)
        self.alpha2 = activation(c_out, size, replacement)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, c_in, s, s] -> [B, c_out, halved(s), halved(s)]."""
        y = self.alpha1(self.bn1(self.conv1(x)))
        return self.alpha2(self.bn2(self.conv2(y)) + self.shortcut(x))


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
        self, widths: Sequence[int], blocks: int, num_classes: int, image_size: int,
        in_channels: int = 3, *, stem_relu: bool = False, shortcut: str = "projection",
        replacement: str = "identity",
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(
            blocks=blocks, num_classes=num_classes, image_size=image_size, in_channels=in_channels,
            **{f"widths[{i}]": width for i, width in enumerate(widths)},
        )  # fmt: skip
        if shortcut not in SHORTCUTS:
            raise ValueError(f"shortcut={shortcut!r}; choose from {sorted(SHORTCUTS)}")
        channels, size = widths[0], image_size
        self.conv1 = conv3x3(in_channels, channels)
        self.bn1 = nn.BatchNorm2d(channels)
        self.alpha = activation(channels, size, replacement) if stem_relu else nn.Identity()
        self.stages = [f"layer{i + 1}" for i in range(len(widths))]
        for stage, width in zip(self.stages, widths, strict=True):
            parts = []
            for i in range(blocks):
                stride = 2 if i == 0 and stage != "layer1" else 1
                options: Any = {"stride": stride, "shortcut": shortcut, "replacement": replacement}
                parts.append(BasicBlock(channels, width, size=size, **options))
                channels, size = width, halved(size, stride)
            self.add_module(stage, nn.Sequential(*parts))
        self.linear = nn.Linear(channels, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in_channels, image_size, image_size] -> logits [B, num_classes]."""
        x = self.alpha(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return self.linear(x.mean((2, 3)))


def resnet18(
    num_classes: int = 10, image_size: int = 32, in_channels: int = 3, *, width: int = 64,
    stem_relu: bool = False, replacement: str = "identity",
) -> ResNet:  # fmt: skip
    """SNL's ResNet18: no max-pool, no stem ReLU; 491,520 ReLUs at 32×32, 1,966,080 at 64×64.

    stem_relu=True adds a ReLU after the stem: 557,056 at 32×32. width: channels of the first
    stage. replacement: what a cleared bit gives, "identity" or "poly".

    >>> with torch.device("meta"):
    ...     net = resnet18(num_classes=100)
    >>> sum(module.mask.numel() for module in net.modules() if hasattr(module, "mask"))
    491520
    """
    arch = {"name": "resnet18", **locals()}
    widths = [width, 2 * width, 4 * width, 8 * width]
    net = ResNet(
        widths, blocks=2, num_classes=num_classes, image_size=image_size, in_channels=in_channels,
        stem_relu=stem_relu, replacement=replacement,
    )  # fmt: skip
    net.arch = arch
    return net


def resnet20(
    num_classes: int = 10, image_size: int = 32, in_channels: int = 3, *, width: int = 16,
    blocks: int = 3, replacement: str = "identity",
) -> ResNet:  # fmt: skip
    """The ResNet-20 of He et al. for CIFAR, with padded shortcuts: 188,416 ReLUs at 32×32.

    blocks: per stage, of three stages; 1 gives a ResNet-8, 9 a ResNet-56.

    >>> fastbcd.masks(resnet20()).count()
    188416
    """
    arch = {"name": "resnet20", **locals()}
    net = ResNet(
        [width, 2 * width, 4 * width], blocks=blocks, num_classes=num_classes,
        image_size=image_size, in_channels=in_channels, stem_relu=True, shortcut="pad",
        replacement=replacement,
    )  # fmt: skip
    net.arch = arch
    return net
