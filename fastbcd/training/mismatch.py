"""The activation mismatch: the angle between a net's activations and the teacher's, at each site.

    Σ over sites of the mean over the batch of ‖a/‖a‖ - t/‖t‖‖

a and t are one sample's outputs of a masked activation in the net and in the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastbcd.graph.fuse import NormActivation
from fastbcd.masking.activations import MaskedActivation
from fastbcd.scoring.metric import at_least_float32

T = TypeVar("T")


def sites_of(model: nn.Module) -> list[nn.Module]:
    """The masked activations of a net, also of one that `fused` has rewritten."""
    return [
        m for m in model.modules() if isinstance(m, MaskedActivation | NormActivation)
    ]


@contextmanager
def noted(
    modules: Iterable[nn.Module], use: Callable[[nn.Module, list[Tensor], Tensor], T]
) -> Iterator[list[T]]:
    """A list to which each call of a module adds use(module, its input tensors, its output).

    >>> net = nn.Sequential(nn.Flatten(), fastbcd.MaskedReLU(2))
    >>> with noted(net, lambda module, inputs, output: type(module).__name__) as names:
    ...     _ = net(torch.tensor([[-1.0, 2.0]]))
    >>> names
    ['Flatten', 'MaskedReLU']
    """
    notes: list[T] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        inputs = [value for value in (*args, *kwargs.values()) if value is not None]
        notes.append(use(module, inputs, output))

    handles = [
        module.register_forward_hook(note, with_kwargs=True) for module in modules
    ]
    try:
        yield notes
    finally:
        for handle in handles:
            handle.remove()


def site_outputs(
    sites: list[nn.Module], use: Callable[[Tensor], Tensor] = lambda output: output
) -> AbstractContextManager[list[Tensor]]:
    """A list to which each call of a site adds use(its output)."""
    return noted(sites, lambda site, inputs, output: use(output))


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
    return torch.linalg.vector_norm(
        activation, dim=tuple(range(1, activation.ndim)), keepdim=True
    )
