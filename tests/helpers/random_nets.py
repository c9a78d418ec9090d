"""Random networks from all operations that the engines accept, and some that they must refuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastbcd import MaskedReLU
from helpers.nets import randomize

Values = list[Tensor]
Op = Callable[["RandomNet", Values], None]


class RandomNet(nn.Module):
    """Runs a list of operations, each on one of the values so far; traceable as it is."""

    def __init__(self, seed: int, *, steps: int = 9, nonlinear: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        self.values = nn.ParameterDict()
        self.ops: list[tuple[str, Callable[[Values], Any]]] = []
        self.random = random.Random(seed)
        self.nonlinear = nonlinear
        values: Values = [torch.zeros(2, 4, 8, 8)]
        self.grow(values, "conv", 0)
        self.grow(values, "masked", 1)
        for _ in range(steps):
            names = [*SPATIAL, "masked", "masked", "conv", "conv"]
            names += ["relu", "max_pool", "sigmoid"] if nonlinear else []
            candidates = [i for i, v in enumerate(values) if v.ndim == 4]
            i = self.random.choice(candidates[-3:])
            self.grow(values, self.random.choice(names), i)
        self.grow(values, "masked", len(values) - 1)
        for i, v in enumerate(list(values)):
            if (v.ndim == 4 and self.random.random() < 0.7) or i == len(values) - 1:
                self.grow(values, self.random.choice(FLATTEN), i)
        for _ in range(3):
            flat = [i for i, v in enumerate(values) if v.ndim == 2]
            self.grow(values, self.random.choice(FLAT), self.random.choice(flat))
        self.read = [i for i, v in enumerate(values) if v.ndim == 2]
        self.head = nn.Linear(sum(values[i].shape[1] for i in self.read), 5)

    def grow(self, values: Values, name: str, i: int) -> None:
        """Add one operation if it fits the value."""
        made = MAKERS[name](self, values, i)
        if made is None:
            return
        found = made(values)
        found = list(found) if isinstance(found, tuple) else [found]
        if all(f.ndim in (2, 4) and 0 < f[0].numel() <= 2048 for f in found):
            self.ops.append((name, made))
            values += found

    def part(self, module: nn.Module) -> str:
        name = f"part{len(self.parts)}"
        self.parts[name] = module.eval()
        return name

    def value(self, *shape: int) -> str:
        name = f"value{len(self.values)}"
        self.values[name] = nn.Parameter(torch.randn(shape))
        return name

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for _, op in self.ops:
            found = op(values)
            values += list(found) if isinstance(found, tuple) else [found]
        return self.head(torch.cat([values[i] for i in self.read], 1))


def random_net(seed: int, **options: Any) -> RandomNet:
    torch.manual_seed(seed)
    with torch.no_grad():  # autograd refuses to write into the views that chunk returns
        net = randomize(RandomNet(seed, **options)).double().eval()
    net.requires_grad_(False)
    return net


MAKERS: dict[str, Callable[[RandomNet, Values, int], Any]] = {}


def maker(function: Callable[[RandomNet, Values, int], Any]) -> Any:
    MAKERS[function.__name__] = function
    return function


def simple(**functions: Callable[[Tensor], Any]) -> list[str]:
    """Operations of one value without settings of their own."""
    for name, function in functions.items():

        def make(net: RandomNet, values: Values, i: int, function: Any = function) -> Any:
            return lambda v: function(v[i])

        MAKERS[name] = make
    return list(functions)


def module_maker(**modules: Callable[[random.Random, Tensor], nn.Module | None]) -> list[str]:
    for name, function in modules.items():

        def make(net: RandomNet, values: Values, i: int, function: Any = function) -> Any:
            module = function(net.random, values[i])
            if module is None:
                return None
            part = net.part(module)
            return lambda v: net.parts[part](v[i])

        MAKERS[name] = make
    return list(modules)


def _conv(r: random.Random, v: Tensor) -> nn.Module | None:
    kernel, padding, stride = (r.randint(1, 3), r.randint(1, 3)), r.randint(0, 2), r.randint(1, 2)
    dilation = r.randint(1, 2)
    for size, k in zip(v.shape[2:], kernel, strict=True):
        if size + 2 * padding - dilation * (k - 1) < 1:
            return None
    channels = r.choice([2, 4, 6])
    groups = 2 if v.shape[1] % 2 == 0 and r.random() < 0.3 else 1
    return nn.Conv2d(v.shape[1], channels, kernel, stride, padding, dilation, groups,
                     bias=r.random() < 0.5)  # fmt: skip


def _even(v: Tensor) -> bool:
    return v.shape[1] % 2 == 0


MODULES = module_maker(
    conv=_conv,
    conv_same=lambda r, v: nn.Conv2d(v.shape[1], 4, 3, padding="same"),
    conv_reflect=lambda r, v: (
        nn.Conv2d(v.shape[1], 2, 3, padding=1, padding_mode="reflect")
        if min(v.shape[2:]) > 1
        else None
    ),
    conv_transpose=lambda r, v: nn.ConvTranspose2d(v.shape[1], 2, 2, stride=r.randint(1, 2)),
    masked=lambda r, v: MaskedReLU(tuple(v.shape[1:])),
    norm=lambda r, v: nn.BatchNorm2d(v.shape[1]),
    average=lambda r, v: nn.AvgPool2d(2) if min(v.shape[2:]) > 1 else None,
    adaptive=lambda r, v: nn.AdaptiveAvgPool2d(r.choice([1, 2, (2, 1)])),
    dropout=lambda r, v: nn.Dropout2d(0.5),
    identity=lambda r, v: nn.Identity(),
    border=lambda r, v: nn.ConstantPad2d(r.randint(0, 1), 2.0),
    replicate=lambda r, v: nn.ReplicationPad2d(1),
    shuffle=lambda r, v: nn.ChannelShuffle(2) if _even(v) else None,
    pixel_shuffle=lambda r, v: nn.PixelShuffle(2) if v.shape[1] % 4 == 0 else None,
    relu=lambda r, v: nn.ReLU(inplace=r.random() < 0.5),
    max_pool=lambda r, v: nn.MaxPool2d(2) if min(v.shape[2:]) > 1 else None,
    sigmoid=lambda r, v: nn.Sigmoid(),
)


def _shuffled(v: Tensor) -> Tensor:
    """As in ShuffleNetV2, with sizes that are read from the tensor."""
    batch, channels, height, width = v.size(0), v.size(1), v.size(2), v.size(3)
    return v.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(
        batch, channels, height, width
    )  # fmt: skip


def _written_view(v: Tensor) -> Tensor:
    """Writes into a view, and reads what it is a view of."""
    view = v[:, :1]
    view.add_(1.5)
    return v * 0.5


def _written_alias(v: Tensor) -> Tensor:
    return (v.clone().mul_(0.5) + 1).sub_(0.25)


def _iadd(v: Tensor) -> Tensor:
    y = v * 2.0
    y += v
    y -= 0.5
    y *= 0.75
    return y


FUNCTIONS = simple(
    negated=lambda v: -v,
    scaled=lambda v: 0.5 * v / 1.5,
    doubled=lambda v: v + v,
    shifted=lambda v: v - 1.25,
    contiguous=lambda v: v.contiguous(),
    cloned=lambda v: v.clone(),
    transposed=lambda v: v.transpose(2, 3),
    permuted=lambda v: v.permute(0, 1, 3, 2),
    moved=lambda v: torch.movedim(v, 3, 2),
    subsampled=lambda v: v[:, :, ::2, ::2],
    first_channels=lambda v: v[:, :2],
    padded=lambda v: F.pad(v, (1, 0, 0, 1), value=0.5),
    reflected=lambda v: F.pad(v, (0, 1, 0, 0), mode="replicate"),
    pooled=lambda v: F.adaptive_avg_pool2d(v, (2, 2)),
    averaged=lambda v: F.avg_pool2d(v, 2, stride=1, padding=1),
    mean_map=lambda v: v.mean((2, 3), keepdim=True) + v,
    dropped=lambda v: F.dropout(v, 0.5, training=False),
    unsqueezed=lambda v: v.unsqueeze(1).squeeze(1),
    iadd=_iadd,
    written_alias=_written_alias,
    written_view=_written_view,
)


@maker
def shuffled(net: RandomNet, values: Values, i: int) -> Any:
    return (lambda v: _shuffled(v[i])) if _even(values[i]) else None


@maker
def chunked(net: RandomNet, values: Values, i: int) -> Any:
    """Halves, one of them or both swapped, by function or method."""
    if not _even(values[i]):
        return None
    kind = net.random.choice(["swap", "tuple", "function", "one"])

    def run(v: Values) -> Any:
        a, b = torch.chunk(v[i], 2, dim=1) if kind == "function" else v[i].chunk(2, 1)
        if kind == "tuple":
            return a, b
        return b if kind == "one" else torch.cat([b, a], 1)

    return run


@maker
def split(net: RandomNet, values: Values, i: int) -> Any:
    channels = values[i].shape[1]
    if channels < 3:
        return None
    dim = net.random.choice([1, 1, 2])
    sizes = [1, values[i].shape[dim] - 1]
    if sizes[1] < 1:
        return None

    def run(v: Values) -> Any:
        parts = v[i].split(sizes, dim)
        return torch.cat([parts[1], parts[0], parts[1]], dim)

    return run


@maker
def shuffle_unit(net: RandomNet, values: Values, i: int) -> Any:
    """ShuffleNetV2's unit: one half as it is, the other through a branch, then shuffled."""
    channels = values[i].shape[1]
    if channels % 2:
        return None
    half, shape = channels // 2, tuple(values[i].shape[2:])
    branch = net.part(nn.Sequential(
        nn.Conv2d(half, half, 3, padding=1, groups=half), nn.BatchNorm2d(half),
        nn.Conv2d(half, half, 1), MaskedReLU((half, *shape)),
    ))  # fmt: skip

    def run(v: Values) -> Tensor:
        kept, changed = v[i].chunk(2, dim=1)
        return _shuffled(torch.cat([kept, net.parts[branch](changed)], 1))

    return run


@maker
def shared(net: RandomNet, values: Values, i: int) -> Any:
    """One convolution called twice."""
    channels = values[i].shape[1]
    part = net.part(nn.Conv2d(channels, channels, 3, padding=1))
    return lambda v: net.parts[part](net.parts[part](v[i]) * 0.5) + v[i]


@maker
def added(net: RandomNet, values: Values, i: int) -> Any:
    others = [j for j, v in enumerate(values) if v.shape == values[i].shape]
    j, sign = net.random.choice(others), net.random.random() < 0.5
    return (lambda v: v[i] + v[j]) if sign else (lambda v: torch.sub(v[i], v[j]))


@maker
def residual(net: RandomNet, values: Values, i: int) -> Any:
    """act(bn(x) + r), which is one step of the program."""
    others = [j for j, v in enumerate(values) if v.shape == values[i].shape]
    j = net.random.choice(others)
    norm = net.part(nn.BatchNorm2d(values[i].shape[1]))
    act = net.part(MaskedReLU(tuple(values[i].shape[1:])))
    return lambda v: net.parts[act](net.parts[norm](v[i]) + v[j])


@maker
def joined(net: RandomNet, values: Values, i: int) -> Any:
    others = [j for j, v in enumerate(values) if v.shape[2:] == values[i].shape[2:]]
    j = net.random.choice(others)
    return lambda v: torch.cat([v[j], v[i]], dim=1)


@maker
def multiplied(net: RandomNet, values: Values, i: int) -> Any:
    shape = net.random.choice([(values[i].shape[1], 1, 1), tuple(values[i].shape[1:])])
    name = net.value(*shape)
    return lambda v: v[i] * net.values[name] - net.values[name]


@maker
def functional_conv(net: RandomNet, values: Values, i: int) -> Any:
    name = net.value(3, values[i].shape[1], 1, 1)
    return lambda v: F.conv2d(v[i], net.values[name], stride=1)


SPATIAL = [m for m in MODULES if m not in ("relu", "max_pool", "sigmoid")] + FUNCTIONS
SPATIAL += ["shuffled", "chunked", "split", "shuffle_unit", "shared", "added", "residual"]
SPATIAL += ["joined", "multiplied", "functional_conv", "chunked", "shuffle_unit"]
FLATTEN = simple(
    flat=lambda v: v.flatten(1),
    torch_flat=lambda v: torch.flatten(v, 1),
    viewed=lambda v: v.reshape(v.size(0), -1),
    by_shape=lambda v: v.reshape(v.shape[0], -1),
    mean=lambda v: v.mean(dim=(2, 3)),
    summed=lambda v: torch.sum(v, (2, 3)),
)
FLAT = module_maker(
    linear=lambda r, v: nn.Linear(v.shape[1], 6),
    norm1=lambda r, v: nn.BatchNorm1d(v.shape[1]),
    masked1=lambda r, v: MaskedReLU((v.shape[1],)),
)


@maker
def functional_linear(net: RandomNet, values: Values, i: int) -> Any:
    name = net.value(4, values[i].shape[1])
    return lambda v: F.linear(v[i], net.values[name])


@maker
def halves(net: RandomNet, values: Values, i: int) -> Any:
    if values[i].shape[1] % 2:
        return None

    def run(v: Values) -> Tensor:
        a, b = v[i].split(v[i].size(1) // 2, dim=1)
        return a - 2.0 * b

    return run


FLAT += ["functional_linear", "halves"]
