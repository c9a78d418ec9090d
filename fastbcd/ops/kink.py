"""kink: the kinks of one site for all trials, in place on the output of a matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbcd import kernels
from fastbcd.ops import reference


def kink(c: Tensor, a: Tensor, mask: Tensor, *, fresh: bool) -> None:
    """c = mask · relu(-(c + a)), in place; with `fresh` the previous content of c counts as 0.

    c [n, T, B] float32 or float64, a [n, B], mask [n, T] uint8, all contiguous.

    >>> c = torch.tensor([[[1.0, -3.0]]])
    >>> kink(c, torch.tensor([[1.0, 1.0]]), torch.ones(1, 1, dtype=torch.uint8), fresh=False)
    >>> c
    tensor([[[0., 2.]]])
    """
    kernel = kernels.choose("kink", c)
    if kernel is None:
        c.copy_(reference.kink(c, a, mask, fresh))
        return
    kernel(c, a, mask, fresh)
    if not c.is_inference():
        torch.autograd.graph.increment_version(c)
