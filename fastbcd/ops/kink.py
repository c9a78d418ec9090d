"""The kinks of one site, for all trials: one pass over the output of the matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbcd import kernels


def kinks_reference(c: Tensor, a: Tensor, mask: Tensor, fresh: bool) -> None:
    """The same in plain PyTorch: what `kinks` means."""
    a = a.unsqueeze(1)
    z = a.expand_as(c) if fresh else c + a
    # c = m · relu(-z)
    c.copy_(torch.where(mask.bool().unsqueeze(2), torch.relu(-z), 0))


def kinks(c: Tensor, a: Tensor, mask: Tensor, *, fresh: bool) -> None:
    """c = mask · relu(-(c + a)), in place; with `fresh` c holds nothing yet and counts as 0.

    c [n, T, B] float32 or float64, a [n, B], mask [n, T] uint8, all contiguous.

    >>> c = torch.tensor([[[1.0, -3.0]]])
    >>> kinks(c, torch.tensor([[1.0, 1.0]]), torch.ones(1, 1, dtype=torch.uint8), fresh=False)
    >>> c
    tensor([[[0., 2.]]])
    """
    module = kernels.choose(c)
    (module.kinks if module else kinks_reference)(c, a, mask, fresh)
