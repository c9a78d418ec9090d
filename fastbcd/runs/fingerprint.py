"""Snapshots of a net: its parameters and buffers by name, masks included."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastbcd.masking.masks import plain_names
from fastbcd.runtime.ranks import differences, digest


def take(net: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer, masks included, on the CPU."""
    return {
        name: t.detach().cpu().contiguous().clone()
        for name, t in tensors_of(net).items()
    }


def restore(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Write a snapshot back into the net, in place."""
    check_fits(net, tensors)
    with torch.no_grad():
        for name, tensor in tensors_of(net).items():
            tensor.copy_(tensors[name])


def check_fits(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Refuse a snapshot of another net, naming the first difference."""
    shapes = {name: list(t.shape) for name, t in tensors_of(net).items()}
    stored = {name: list(t.shape) for name, t in tensors.items()}
    for name, mine, other in differences(shapes, stored):
        raise ValueError(
            f"the snapshot is of another net: {name} has shape {mine} in the net and {other} in "
            f"the snapshot"
        )


def weights_mark(net: nn.Module | None) -> str | None:
    """A short text that changes with any weight or buffer; None without a net."""
    if net is None:
        return None
    return f"{type(net).__name__} {digest(tensors_of(net)).hex()[:16]}"


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    """The net's own parameters and buffers, by their names without the prefixes of wrappers."""
    tensors = dict((*net.named_parameters(), *net.named_buffers()))
    return {plain: tensors[name] for name, plain in plain_names(tensors).items()}
