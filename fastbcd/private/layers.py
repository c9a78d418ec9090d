"""The linear layers and the max-pools of a net: what private inference pays for besides its ReLUs.

A layer is a product of weights [terms, channels] with `positions` rows for each image: a
convolution of k×k is one of channels_in * k * k terms.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from fastbcd.data.for_net import image_shape, remember_shape
from fastbcd.masking.missed_relus import comparisons
from fastbcd.runtime.dtypes import device_of, dtype_of
from fastbcd.runtime.module_mode import eval_mode

RING = 8192  # coefficients of a ciphertext of SPU's Cheetah
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
MEANS = ("mean", "avg_pool2d", "_adaptive_avg_pool2d")


class Layer(NamedTuple):
    """An operation and what its cost goes by, for all images of a run.

    >>> product("fc", positions=1, terms=64, channels=10, inputs=64).amounts["weights"]
    640
    """

    name: str
    kind: str  # "layer"; "line" of a mean or a factor; "relu" of comparisons; "reveal" of logits
    amounts: dict[str, int]


def product(
    name: str,
    positions: int,
    terms: int,
    channels: int,
    *,
    inputs: int,
    groups: int = 1,
) -> Layer:
    """A linear layer; terms and channels: of one group."""
    outputs = positions * channels
    tiles = _tiles(positions, terms, channels)
    amounts = {
        "units": outputs * terms,  # multiplications
        "sites": 1,
        "weights": terms * channels,
        "patches": positions * terms,
        "outputs": outputs,
        **tiles,
    }
    whole = {key: groups * number for key, number in amounts.items()}
    return Layer(name, "layer", whole | {"sites": 1, "inputs": inputs})


def layers_of(
    net: nn.Module, images: Tensor | None = None, batch: int = 1
) -> list[Layer]:
    """What the net computes besides its masked ReLUs, in the order of execution.

    images: like those that the net takes; None: of the size that it was last used with here.
    batch: images of a run.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    >>> [(layer.name, layer.amounts["units"]) for layer in layers_of(net, torch.zeros(1, 3, 4, 4))]
    [('0', 3456), ('1', 128), ('2', 96), ('logits', 32)]
    """
    if images is not None:
        remember_shape(net, tuple(images.shape[1:]))
    shape = image_shape(net)
    if shape is None:
        raise ValueError(
            f"the layers of {type(net).__name__} are not known, since it has not been used with "
            f"images: pass images=, convert it with fastbcd.convert, or give activations_only=True"
        )
    example = torch.zeros(batch, *shape, dtype=dtype_of(net), device=device_of(net))
    with (
        eval_mode(net),
        torch.no_grad(),
        ModuleTracker() as modules,
        _Recorder(modules) as seen,
    ):
        logits = net(example)
    size = sum(t.numel() for t in tree_leaves(logits) if isinstance(t, Tensor))
    return [*seen.layers, Layer("logits", "reveal", {"units": size, "sites": 1})]


class _Recorder(TorchDispatchMode):
    """Records the linear layers, means and max-pools that are computed while it is active."""

    def __init__(self, modules: ModuleTracker) -> None:
        super().__init__()
        self.modules = modules
        self.layers: list[Layer] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        operator = function.overloadpacket.__name__.rstrip("_")
        name = max(self.modules.parents, key=len).partition(".")[2] or operator
        if operator == "convolution":
            self._add_convolution(name, result, *args)
        elif operator in PRODUCTS:
            self._add_product(name, *args[-2:])
        elif operator in MEANS or _scales(operator, args):
            self._add(name, "line", result.numel(), 1)
        else:
            self._add_comparisons(name, operator, args, result)
        return result

    def _add(self, name: str, kind: str, units: int, sites: int) -> None:
        self.layers.append(Layer(name, kind, {"units": units, "sites": sites}))

    def _add_convolution(
        self, name: str, y: Tensor, x: Tensor, weight: Tensor, *options: Any
    ) -> None:
        groups = options[-1]
        layer = product(
            name,
            positions=y[:, 0].numel(),
            terms=weight[0].numel(),
            channels=y.shape[1] // groups,
            inputs=x.numel(),
            groups=groups,
        )
        self.layers.append(layer)

    def _add_product(self, name: str, x: Tensor, weight: Tensor) -> None:
        layer = product(
            name,
            positions=x.shape[-2],
            terms=weight.shape[-2],
            channels=weight.shape[-1],
            inputs=x.numel(),
            groups=math.prod(weight.shape[:-2]),
        )
        self.layers.append(layer)

    def _add_comparisons(
        self, name: str, operator: str, args: Any, result: Any
    ) -> None:
        """Max-pools and ReLUs without masks."""
        values = next(
            iter(tree_leaves(result)), None
        )  # of a max-pool, not where they come from
        if isinstance(values, Tensor):
            count = comparisons(operator, args, values)
            if (
                count
            ):  # a tree of them for each value, each with a product, as a ReLU has
                levels = math.ceil(math.log2(count / values.numel() + 1))
                self._add(name, "relu", count, levels)


def _scales(operator: str, args: Any) -> bool:
    """Whether an operation multiplies by a parameter, as a merged line does."""
    return operator == "mul" and any(isinstance(arg, nn.Parameter) for arg in args)


def _tiles(positions: int, terms: int, channels: int) -> dict[str, int]:
    """How SPU's Cheetah divides a product into ciphertexts, as its log of 19 products shows.

    A tile of p positions, t terms and c channels has p t c <= RING. The factor that takes fewer
    ciphertexts is sent; t is the power of two for which these are fewest.
    """
    choices = []
    depth = 16 if terms >= 16 else 1
    while depth <= min(terms, 2048 if positions > 1 else RING):
        area = RING // depth
        steps = math.ceil(terms / depth)
        for sent, other in ((channels, positions), (positions, channels)):
            width = min(sent, area)
            height = max(1, min(other, area // width))
            columns = math.ceil(sent / width)
            tiles = columns * math.ceil(other / height)
            choices.append((steps * columns, tiles, tiles * steps))
        depth *= 2
    fewest = min(choices)[0]
    if positions == 1:  # a vector: its tiles count, too
        fewest = min(choices, key=lambda choice: choice[0] + choice[1])[0]
    cheapest = [choice for choice in choices if choice[0] == fewest]
    _, tiles, products = min(cheapest, key=lambda choice: choice[2] + 5 * choice[1])
    back = math.ceil(positions * channels / RING)
    return {"sent": fewest, "back": back, "tiles": tiles, "tile_products": products}
