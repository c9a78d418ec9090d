"""Small nets with the published structure of SNL, AutoReP and ReLUPruner.

One residual net and one pre-activation net, each with the activation of either system. Names of
weights and tensors and the forward are those of the systems, so that an imported net can be
compared with them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SNLActivation(nn.Module):
    """a·relu(x) + (1-a)·x."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.alphas = nn.Parameter((torch.rand(1, channels, size, size) > 0.5).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.alphas * F.relu(x) + (1 - self.alphas) * x


class AutoRePActivation(nn.Module):
    """m·relu(x) + (1-m)·(s2·c2·x² + c1·x + c0), one module for all sites, called in order."""

    def __init__(self, shapes: list[tuple[int, int]], degree: int, s: float, clip: float) -> None:
        super().__init__()
        self.degree, self.s, self.clip, self.calls, self.sites = degree, s, clip, 0, len(shapes)
        self.itr_cnt = nn.Parameter(torch.tensor([508.0]))
        for f, (c, n) in enumerate(shapes):
            self.register_parameter(f"alpha_mask_{f}_0", nn.Parameter(torch.rand(c, n, n).round()))
            # Around the threshold, so that the hysteresis changes some bits both ways.
            aux = nn.Parameter(0.01 * torch.randn(c, n, n))
            self.register_parameter(f"alpha_aux_{f}_0", aux)
            for i in range(degree + 1):
                coefficient = nn.Parameter(torch.randn(1, c, 1, 1))
                self.register_parameter(f"poly_para_{f}_{i}", coefficient)
            self.add_module(f"bn_{f}", nn.BatchNorm2d(c, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        f = self.calls
        self.calls = (f + 1) % self.sites
        m, aux = getattr(self, f"alpha_mask_{f}_0"), getattr(self, f"alpha_aux_{f}_0")
        with torch.no_grad():  # in eval mode too
            m.copy_(m * (aux > -0.003).float() + (1 - m) * (aux > 0.003).float())
        c = [getattr(self, f"poly_para_{f}_{i}") for i in range(self.degree + 1)]
        if self.degree == 2:
            poly = self.s * c[2].clamp(-self.clip, self.clip) * x * x + c[1] * x + c[0]
        else:
            poly = self.s * c[1] * x + c[0]
        return m * F.relu(x) + (1 - m) * poly


class Residual(nn.Module):
    """SNL's ResNet18, narrow: no stem ReLU, 4 stages of 2 blocks, projections with batch norm."""

    def __init__(self, act, width: int, classes: int, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        c, size = width, 8
        for i in range(4):
            blocks = []
            for j in range(2):
                stride, out = (2, 2 * c) if i and not j else (1, c)
                size //= stride
                block = nn.Module()
                block.conv1 = nn.Conv2d(c, out, 3, stride, 1, bias=False)
                block.bn1 = nn.BatchNorm2d(out)
                block.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
                block.bn2 = nn.BatchNorm2d(out)
                block.shortcut = nn.Sequential()
                if stride > 1:
                    projection = nn.Conv2d(c, out, 1, stride, bias=False)
                    block.shortcut = nn.Sequential(projection, nn.BatchNorm2d(out))
                if shared is None:
                    block.alpha1, block.alpha2 = act(out, size), act(out, size)
                else:
                    block.relu = shared
                blocks.append(block)
                c = out
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.linear = nn.Linear(c, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        for i in range(4):
            for block in self.get_submodule(f"layer{i + 1}"):
                first = block.relu if hasattr(block, "relu") else block.alpha1
                second = block.relu if hasattr(block, "relu") else block.alpha2
                y = block.bn2(block.conv2(first(block.bn1(block.conv1(x)))))
                x = second(y + block.shortcut(x))
        return self.linear(F.avg_pool2d(x, x.shape[-1]).flatten(1))


class Wide(nn.Module):
    """SNL's Wide-ResNet-22 of factor 1: pre-activation, no final ReLU."""

    def __init__(self, act, classes: int, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        c, size = 16, 8
        for i in range(3):
            blocks = []
            for j in range(3):
                out, stride = (16 * 2**i, 2) if i and not j else (16 * 2**i, 1)
                block = nn.Module()
                block.bn1 = nn.BatchNorm2d(c)
                block.conv1 = nn.Conv2d(c, out, 3, stride, 1, bias=False)
                block.bn2 = nn.BatchNorm2d(out)
                block.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
                block.convShortcut = None
                if c != out:
                    block.convShortcut = nn.Conv2d(c, out, 1, stride, bias=False)
                if shared is None:
                    block.alpha1, block.alpha2 = act(c, size), act(out, size // stride)
                else:
                    block.relu1 = block.relu = block.relu2 = shared
                size //= stride
                blocks.append(block)
                c = out
            group = nn.Module()
            group.layer = nn.Sequential(*blocks)
            self.add_module(f"block{i + 1}", group)
        self.bn1 = nn.BatchNorm2d(c)
        if shared is not None:
            self.relu = shared  # never called
        self.fc = nn.Linear(c, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for i in range(3):
            for block in self.get_submodule(f"block{i + 1}").layer:
                first = block.relu if hasattr(block, "relu") else block.alpha1
                second = block.relu if hasattr(block, "relu") else block.alpha2
                a = first(block.bn1(x))
                y = block.conv2(second(block.bn2(block.conv1(a))))
                x = y + (x if block.convShortcut is None else block.convShortcut(a))
        return self.fc(F.avg_pool2d(self.bn1(x), x.shape[-1]).flatten(1))


RESIDUAL_SHAPES = [(4 * 2**i, 8 // 2**i) for i in range(4) for _ in range(4)]
WIDE_SHAPES = [(16, 8)] * 6 + [(16, 8)] + [(32, 4)] * 5 + [(32, 4)] + [(64, 2)] * 5


class Wrapped(nn.Module):
    """AutoReP keeps its net under `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def snl(arch: str, classes: int = 5) -> nn.Module:
    """SNL's net with hard random alphas, in eval mode."""
    torch.manual_seed(3)
    net = (
        Residual(SNLActivation, 4, classes) if arch == "resnet18" else Wide(SNLActivation, classes)
    )
    return lively(net)


def autorep(arch: str, degree: int = 2, s: float = 0.1, clip: float = 9.0) -> nn.Module:
    """AutoReP's net with random masks, indicators and coefficients, in eval mode."""
    torch.manual_seed(4)
    residual = arch == "resnet18"
    act = AutoRePActivation(RESIDUAL_SHAPES if residual else WIDE_SHAPES, degree, s, clip)
    return lively(Wrapped(Residual(None, 4, 5, act) if residual else Wide(None, 5, act)))


def lively(net: nn.Module) -> nn.Module:
    """Statistics and weights of batch norm that are not the defaults."""
    for name, module in net.named_modules():
        if isinstance(module, nn.BatchNorm2d) and module.weight is not None:
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            # The last batch norm of a block small, so that polynomials stay finite.
            scale = 0.3 if name.endswith("bn2") else 1.0
            nn.init.uniform_(module.weight, 0.5 * scale, scale)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    return net.eval()
