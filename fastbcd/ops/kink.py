"""kink: the kinks of one site for all trials, in place on the output of a matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbcd.kernels.geometry import compute_dtype
from fastbcd.ops import reference
from fastbcd.ops.calls import KERNELS, Kernel, KernelCall
from fastbcd.ops.registry import compute


def kink(c: Tensor, a: Tensor, mask: Tensor, *, fresh: bool) -> None:
    """c = mask · relu(-(c + a)), in place; with `fresh` the previous content of c counts as 0.

    c [n, T, B] float32 or float64, a [n, B], mask [n, T] uint8, all contiguous.

    >>> c = torch.tensor([[[1.0, -3.0]]])
    >>> kink(c, torch.tensor([[1.0, 1.0]]), torch.ones(1, 1, dtype=torch.uint8), fresh=False)
    >>> c
    tensor([[[0., 2.]]])
    """
    arguments = (c, a, mask, fresh)
    compute("kink", _lay_out(*arguments), arguments)
    if not c.is_inference():
        torch.autograd.graph.increment_version(c)


def _lay_out(c: Tensor, a: Tensor, bits: Tensor, fresh: bool) -> KernelCall:
    return KernelCall([c], (a, bits, fresh), fits=c.dtype == compute_dtype(c.dtype))


KERNELS["kink"] = Kernel(
    "kink(Tensor c, Tensor a, Tensor bits, bool fresh) -> Tensor",
    _lay_out,
    reference.kink,
)
