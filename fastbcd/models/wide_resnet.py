"""Wide ResNets, pre-activation, on masked activations: Wide-ResNet-22-8 as SNL has it.

    a = alpha1(bn1(x))
    block(x) = conv2(alpha2(bn2(conv1(a)))) + (x, or convShortcut(a) where the shape changes)

Names of weights and sites are SNL's: block1.layer.0.convShortcut.weight,
block1.layer.0.alpha1.mask. A final ReLU, where there is one, is the site `alpha`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastbcd.models.layers import activation, check_sizes, conv3x3, halved, initialise


class WideBlock(nn.Module):
    """Two activated 3×3 convolutions, added to the input or to a 1×1 convolution of it."""

    def __init__(self, c_in: int, c_out: int, *, stride: int, size: int, replacement: str) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(c_in)
        self.alpha1 = activation(c_in, size, replacement)
        self.conv1 = conv3x3(c_in, c_out, stride)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.alpha2 = activation(c_out, halved(size, stride), replacement)
        self.conv2 = conv3x3(c_out, c_out)
        self.convShortcut = None
        if stride > 1 or c_in != c_out:
            self.convShortcut = nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, c_in, s, s] -> [B, c_out, halved(s), halved(s)]."""
        a = self.alpha1(self.bn1(x))
        y = self.conv2(self.alpha2(self.bn2(self.conv1(a))))
        return y + (x if self.convShortcut is None else self.convShortcut(a))


class WideGroup(nn.Module):
    """Blocks of one width, behind the name `layer` as in SNL."""

    def __init__(
        self, c_in: int, c_out: int, *, stride: int, size: int, blocks: int, replacement: str
    ) -> None:
        super().__init__()
        first = WideBlock(c_in, c_out, stride=stride, size=size, replacement=replacement)
        inner: Any = {"stride": 1, "size": halved(size, stride), "replacement": replacement}
        rest = [WideBlock(c_out, c_out, **inner) for _ in range(blocks - 1)]
        self.layer = nn.Sequential(first, *rest)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, c_in, s, s] -> [B, c_out, halved(s), halved(s)]."""
        return self.layer(x)


class WideResNet(nn.Module):
    """A 3×3 stem of 16 channels and three groups of 16, 32, 64 times `factor` channels.

    depth = 6·blocks + 4.

    >>> net = WideResNet(10, 1, num_classes=3, image_size=8)
    >>> net(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 3])
    """

    arch: dict[str, Any] | None = None  # how a function of fastbcd.models built it

    def __init__(
        self, depth: int, factor: int, num_classes: int, image_size: int, in_channels: int = 3,
        *, final_relu: bool = False, replacement: str = "identity",
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(
            depth=depth, factor=factor, num_classes=num_classes, image_size=image_size,
            in_channels=in_channels,
        )  # fmt: skip
        blocks, odd = divmod(depth - 4, 6)
        if odd or blocks < 1:
            raise ValueError(f"depth={depth}; a wide ResNet has 6·blocks + 4 layers: 10, 16, 22, …")
        channels, size = 16, image_size
        self.conv1 = conv3x3(in_channels, channels)
        groups = []
        for i in range(3):
            width, stride = 16 * 2**i * factor, 1 if i == 0 else 2
            groups.append(
                WideGroup(channels, width, stride=stride, size=size, blocks=blocks,
                          replacement=replacement)
            )  # fmt: skip
            channels, size = width, halved(size, stride)
        self.block1, self.block2, self.block3 = groups
        self.bn1 = nn.BatchNorm2d(channels)
        self.alpha = activation(channels, size, replacement) if final_relu else nn.Identity()
        self.fc = nn.Linear(channels, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in_channels, image_size, image_size] -> logits [B, num_classes]."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        return self.fc(self.alpha(self.bn1(x)).mean((2, 3)))


def wide_resnet22_8(
    num_classes: int = 10, image_size: int = 32, in_channels: int = 3, *, factor: int = 8,
    final_relu: bool = False, replacement: str = "identity",
) -> WideResNet:  # fmt: skip
    """SNL's Wide-ResNet-22-8: 1,359,872 ReLUs at 32×32, 5,439,488 at 64×64.

    final_relu=True adds a ReLU after the last batch norm, as the original has it: 1,392,640 at
    32×32. factor: 8 widens a ResNet of 16, 32, 64 channels eightfold.

    >>> with torch.device("meta"):
    ...     net = wide_resnet22_8(num_classes=100)
    >>> sum(module.mask.numel() for module in net.modules() if hasattr(module, "mask"))
    1359872
    """
    arch = {"name": "wide_resnet22_8", **locals()}
    net = WideResNet(
        22, factor, num_classes=num_classes, image_size=image_size, in_channels=in_channels,
        final_relu=final_relu, replacement=replacement,
    )  # fmt: skip
    net.arch = arch
    return net
