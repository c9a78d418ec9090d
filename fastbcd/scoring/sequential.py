"""sequential: the paper's loop, one hypothesis at a time; the reference for the other engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastbcd.masking.masks import MaskSet, set_masks

Outputs = Iterator[tuple[list[int], Any]]  # numbers of hypotheses, and their outputs


class Sequential:
    """The engine: write a hypothesis's masks into the net and run it."""

    name = "sequential"
    memory_format = torch.contiguous_format

    def __init__(self, net: nn.Module, masks: MaskSet) -> None:
        self.net, self.masks = net, masks

    def prepare(self, removals: dict[int, Tensor], lanes: int) -> dict[int, Tensor]:
        return removals

    def logits(
        self, x: Tensor, removals: dict[int, Tensor], base: bool, batch: int | None = None
    ) -> Outputs:
        """([number], outputs [1, B, ...]) of every hypothesis, and of the base as number -1."""
        nothing = {-1: torch.empty(0, dtype=torch.int64)} if base else {}
        for number, ids in {**nothing, **removals}.items():
            set_masks(self.net, self.masks.without(ids))
            outputs = self.net(x.clone())  # the net may write into its input
            yield [number], tree_map_only(Tensor, lambda t: t.unsqueeze(0), outputs)
