"""The activation mismatch: the angle between a net's activations and the teacher's, at each site.

    Σ over sites of the mean over the batch of ‖a/‖a‖ - t/‖t‖‖

a and t are one sample's outputs of a masked activation in the net and in the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.graph.fuse import NormActivation
from fastbcd.masking.activations import MaskedActivation
from fastbcd.scoring.metric import at_least_float32


def sites_of(model: nn.Module) -> list[nn.Module]:
    """The masked activations of a net, also of one that `fused` has rewritten."""
    return [m for m in model.modules() if isinstance(m, MaskedActivation | NormActivation)]


@contextmanager
def site_outputs(
    sites: list[nn.Module], use: Callable[[Tensor], Tensor] = lambda output: output
) -> Iterator[list[Tensor]]:
    """A list to which each of the modules adds use(its output), as it is called.

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(2))
    >>> with site_outputs(sites_of(net)) as seen:
    ...     _ = net(torch.tensor([[-1.0, 2.0]]))
    >>> seen
    [tensor([[0., 2.]])]
    """
    seen: list[Tensor] = []

    def add(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(use(output))

    handles = [site.register_forward_hook(add) for site in sites]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def direction(activation: Tensor) -> Tensor:
    """Each sample of [B, ...] divided by its norm, in float32 or wider; zeros stay zeros."""
    activation = at_least_float32(activation)
    norm = _norm(activation)
    return activation / norm.masked_fill(norm == 0, math.inf)


def mismatch(activations: list[Tensor], directions: list[Tensor]) -> Tensor:
    """The sum over sites of the net's activations and the teacher's directions. Empties both.

    >>> mismatch([torch.tensor([[3.0, 0.0]])], [torch.tensor([[0.0, 1.0]])])
    tensor(1.4142)
    """
    if len(activations) != len(directions):
        raise ValueError(
            f"the net called {len(activations)} masked activations and the teacher "
            f"{len(directions)} for one batch, so they cannot be compared; use mismatch=0"
        )
    total = torch.zeros((), device=activations[0].device)
    while activations:
        total = total + _norm(direction(activations.pop()) - directions.pop()).mean()
    return total


def _norm(activation: Tensor) -> Tensor:
    """Of each sample, [B, ...] -> [B, 1, ...]; unlike flatten, it copies nothing."""
    return torch.linalg.vector_norm(activation, dim=tuple(range(1, activation.ndim)), keepdim=True)
