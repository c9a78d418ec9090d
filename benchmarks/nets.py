"""The networks of the paper, as a user has them: plain PyTorch modules with nn.ReLU calls.

ResNet18 with SNL's shape (no stem ReLU, no max-pool: 491,520 ReLUs at 32×32) and ResNet-20
with option-A shortcuts (188,416 ReLUs).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OptionA(nn.Module):
    """Subsample by two, pad the channels with zeros on both sides."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.each = extra // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.each, self.each))


class BasicBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int, option_a: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.shortcut: nn.Module = nn.Sequential()
        if stride > 1 or c_in != c_out:
            projection = nn.Conv2d(c_in, c_out, 1, stride, bias=False)
            self.shortcut = (
                OptionA(c_out - c_in)
                if option_a
                else nn.Sequential(projection, nn.BatchNorm2d(c_out))
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(
        self, widths: list[int], blocks: int, classes: int, small: bool
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.stem_relu = small
        c_in = widths[0]
        self.stages = [f"layer{i + 1}" for i in range(len(widths))]
        for i, width in enumerate(widths):
            strides = [2 if i else 1] + [1] * (blocks - 1)
            stage = [
                BasicBlock(c_in if not j else width, width, stride, option_a=small)
                for j, stride in enumerate(strides)
            ]
            self.add_module(self.stages[i], nn.Sequential(*stage))
            c_in = width
        self.linear = nn.Linear(c_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        x = F.relu(x) if self.stem_relu else x
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return self.linear(x.mean((2, 3)))


def build(name: str) -> nn.Module:
    """resnet18 (100 classes) or resnet20 (10 classes) with random weights and live statistics."""
    torch.manual_seed(0)
    net = (
        ResNet([64, 128, 256, 512], 2, 100, small=False)
        if name == "resnet18"
        else ResNet([16, 32, 64], 3, 10, small=True)
    )
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return net.eval()
