"""Small networks and data for the scoring tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastbcd
from fastbcd import MaskedLine, MaskedPoly, MaskedReLU


class Block(nn.Module):
    """A basic residual block with a projection, or an identity, as its shortcut."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or c_in != c_out:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride), nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


class PreBlock(nn.Module):
    """A pre-activation block: the sum is used twice and is not activated itself."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
        self.conv1, self.conv2 = nn.Conv2d(c, c, 3, 1, 1), nn.Conv2d(c, c, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(torch.relu(self.bn1(x)))
        x += self.conv2(F.relu(self.bn2(y)))
        return x


class Dense(nn.Module):
    """Concatenated branches, a pool, a dropout, and sizes taken from the tensor they shape."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(c, 3, 1), nn.Conv2d(c, 5, 3, padding=1)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.relu(self.a(x)), self.b(x).relu_()
        y = torch.cat([a, F.max_pool2d(b, 3, 1, 1), x], 1)
        return self.drop(y).view(y.size(0), y.shape[1], -1).mean(2)


class TravellingSize(nn.Module):
    """The batch size is taken at the start and used on another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(4 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)
        y = torch.relu(self.conv(x))
        y = torch.relu(y - 0.1)
        return self.head(y.view(batch, -1))


class Untraceable(nn.Module):
    """Control flow that depends on the data, with the activation placed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(3 * 64, 20), MaskedReLU(20)
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.linear(x.flatten(1)))
        return self.head(y if bool(y.abs().sum() > 0) else -y)


class Mixture(nn.Module):
    """ReLU and polynomial sites in one net, placed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6)
        self.act, self.linear = MaskedPoly((6, 8, 8)), nn.Linear(6 * 64, 12)
        self.act2, self.head = MaskedReLU(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(x)))
        return self.head(self.act2(self.linear(y.flatten(1))))


def randomize(net: nn.Module, seed: int = 0) -> nn.Module:
    """Batch-norm statistics and coefficients that are not the defaults."""
    torch.manual_seed(seed)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
        if isinstance(module, MaskedLine | MaskedPoly):
            nn.init.normal_(module.coef, 0, 0.3)
    return net


def make(name: str) -> nn.Module:
    """A net with masks for images [3, 8, 8] and 5 classes, in eval mode."""
    torch.manual_seed(1)
    if name == "untraceable":
        return randomize(Untraceable()).eval()
    if name == "mixture":
        return randomize(Mixture()).eval()
    tails = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    models: dict[str, nn.Module] = {
        "mlp": nn.Sequential(
            nn.Flatten(), nn.Linear(192, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(),
            nn.Linear(20, 5),
        ),
        "resnet": nn.Sequential(
            nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(), Block(4, 4, 1),
            Block(4, 8, 2), *tails,
        ),
        "preactivation": nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1), PreBlock(8), PreBlock(8), *tails
        ),
        "dense": nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(), Dense(4), nn.Linear(12, 5)),
        "sizes": TravellingSize(),
        "poly": nn.Sequential(
            nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(), Block(4, 8, 2), *tails
        ),
    }  # fmt: skip
    replacement = name if name in ("line", "poly") else "identity"
    model = randomize(models["poly" if name == "line" else name]).eval()
    net = fastbcd.convert(model, torch.randn(2, 3, 8, 8), replacement=replacement)
    return randomize(net) if name == "line" else net


TRACEABLE = ["mlp", "resnet", "preactivation", "dense", "sizes", "line", "poly", "mixture"]


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 8, 8, generator=g), torch.randint(5, (n,), generator=g)


def thinned(net: nn.Module, keep: float = 0.6) -> nn.Module:
    """Some ReLUs are gone already."""
    masks = fastbcd.masks(net)
    gone = masks.sample(int((1 - keep) * masks.total), seed=7, step=0, trial=0)
    fastbcd.set_masks(net, masks.without(gone))
    return net


def emptied(net: nn.Module, seed: int) -> nn.Module:
    """Some sites keep no ReLU any more, at random; at least one keeps its own."""
    masks, g = fastbcd.masks(net).copy(), torch.Generator().manual_seed(seed)
    chosen = torch.rand(len(masks.sites), generator=g) < 0.5
    chosen[torch.randint(len(chosen), (1,), generator=g)] = False
    for site, empty in zip(masks.sites, chosen.tolist(), strict=True):
        masks.bits[site.start : site.start + site.numel] &= not empty
    fastbcd.set_masks(net, masks)
    return net
