"""sequential: the paper's loop, one hypothesis at a time; the reference for the other engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastbcd.graph.trace import logits_of
from fastbcd.masking.masks import MaskSet, mask_modules

Change = tuple[
    Tensor, Tensor
]  # a site's mask, and the places in it of the ReLUs removed
Outputs = Iterator[tuple[list[int], Any]]  # numbers of hypotheses, and their outputs


class Sequential:
    """The engine: write a hypothesis's masks into the net, where they differ, and run it."""

    name = "sequential"
    memory_format = torch.contiguous_format
    fast = "bf16"

    def __init__(self, net: nn.Module, masks: MaskSet) -> None:
        self.net = net
        self.masks = [module.mask for module in mask_modules(net).values()]
        self.starts = torch.tensor([site.start for site in masks.sites])

    def prepare(
        self, removals: dict[int, Tensor], lanes: int
    ) -> dict[int, list[Change]]:
        """By number, the sites that a hypothesis changes."""
        return {number: self._changes(ids) for number, ids in removals.items()}

    def _changes(self, ids: Tensor) -> list[Change]:
        site_of = torch.searchsorted(self.starts, ids, right=True) - 1
        changes = []
        for site in site_of.unique():
            mask = self.masks[site]
            inside = ids[site_of == site] - self.starts[site]
            changes.append((mask, inside.to(mask.device)))
        return changes

    def logits(
        self,
        x: Tensor,
        work: dict[int, list[Change]],
        base: bool,
        images: Tensor | None = None,
    ) -> Outputs:
        """([number], outputs [1, B, ...]) of every hypothesis, and of the base as number -1."""
        if base:
            work = {-1: [], **work}
        for number, changes in work.items():
            before = [mask.clone() for mask, _ in changes]
            try:
                for mask, ids in changes:
                    mask.copy_(mask.flatten().index_fill(0, ids, False).view_as(mask))
                outputs = logits_of(
                    self.net(x.clone())
                )  # the net may write into its input
            finally:
                for (mask, _), bits in zip(changes, before, strict=True):
                    mask.copy_(bits)
            yield [number], tree_map_only(Tensor, lambda t: t.unsqueeze(0), outputs)
