"""What the linear layers of a net cost after merging, for any number of ReLUs at each site."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import fx, nn

from fastbcd.masking.masks import masks
from fastbcd.private.cuts import Cutting
from fastbcd.private.layers import Layer
from fastbcd.private.linear_runs import LinearRuns


class MergedLayers:
    """The linear layers of a net, merged where they cost least by `price`.

    >>> net = fastbcd.models.resnet20(num_classes=10, image_size=32)
    >>> layers = MergedLayers(net, lambda layers: len(layers))
    >>> layers.cost(np.eye(19)[[0, 18]])  # maps to the only site in use, and to the logits
    array([2., 2.])
    >>> [len(family) for family in layers.families()]
    [3, 3, 3, 9, 7, 6, 6]
    """

    def __init__(
        self, net: nn.Module, price: Callable[[Iterable[Layer]], float]
    ) -> None:
        self.runs = LinearRuns(net)
        self.cutting = Cutting(self.runs, price)
        self.sites = masks(net).sites

    def cost(self, counts: np.ndarray) -> Any:
        """Of masks that keep so many ReLUs at each site, [..., sites] -> [...]."""
        sets, index = np.unique(
            counts.reshape(-1, len(self.sites)) > 0, axis=0, return_inverse=True
        )
        costs = []
        for used in sets:
            names = [
                site.name for site, use in zip(self.sites, used, strict=True) if use
            ]
            costs.append(self.cutting.best(frozenset(names)).cost)
        return np.array(costs)[index.reshape(counts.shape[:-1])]

    def others(self, layers: Iterable[Layer]) -> list[Layer]:
        """The layers that are not merged, such as max-pools."""
        merged = {str(n.target) for n in self.runs.nodes if n.name in self.runs.paths}
        return [layer for layer in layers if layer.name not in merged]

    def families(self) -> list[tuple[int, ...]]:
        """Sites that save more together: inside of blocks, of one size, and both."""
        inner = self._inner()
        shapes = list(dict.fromkeys(site.shape for site in self.sites))
        families = []
        for shape in shapes:
            families.append([n for n in inner if self.sites[n].shape == shape])
        families.append(inner)
        for shape in shapes:
            families.append(
                [n for n, site in enumerate(self.sites) if site.shape == shape]
            )
        return [tuple(family) for family in families if len(family) > 1]

    def _inner(self) -> list[int]:
        """The sites that a residual connection bypasses."""
        numbers = {site.name: number for number, site in enumerate(self.sites)}
        inner = []
        for node in self.runs.nodes:
            site = self.runs.sites.get(node.name)
            if site in numbers and self._reaches_the_end_without(node):
                inner.append(numbers[site])
        return sorted(set(inner))

    def _reaches_the_end_without(self, avoided: fx.Node) -> bool:
        """Whether the output depends on the image also without a node."""
        reached: set[fx.Node] = set()
        for node in self.runs.nodes:
            begins = node.op == "placeholder"
            if node is not avoided and (
                begins or reached.intersection(node.all_input_nodes)
            ):
                reached.add(node)
        return self.runs.nodes[-1] in reached
