"""Snapshots: a net's weights, buffers and masks as plain tensors, and what a net or data is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbcd.data.images import ImageData
from fastbcd.masking.masks import masks, plain_name
from fastbcd.runtime.ranks import digest

LOOKED_AT = 256  # images that stand for the data in its mark


def take(net: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer, masks among them, on the CPU.

    >>> sorted(take(fastbcd.MaskedReLU(2)))
    ['mask']
    """
    return {name: t.detach().cpu().contiguous().clone() for name, t in _tensors(net).items()}


def restore(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Write a snapshot back into the net, in place."""
    mine = _tensors(net)
    if mine.keys() != tensors.keys():
        first = min(mine.keys() ^ tensors.keys())
        raise ValueError(f"the snapshot is of another net: {first!r} is in only one of them")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])


def structure(net: nn.Module) -> dict[str, Any]:
    """What makes two nets the same up to their values, as JSON: sites, tensors, shapes, dtypes."""
    sites = {site.name: list(site.shape) for site in masks(net).sites}
    tensors = {
        name: f"{str(t.dtype)[6:]} {list(t.shape)}" for name, t in sorted(_tensors(net).items())
    }
    return {"sites": sites, "tensors": tensors}


def data_mark(data: ImageData) -> str:
    """A short text that changes with the data: its size, all labels, and some of its images."""
    some = data.images[:: max(1, len(data) // LOOKED_AT)]
    stats = torch.tensor([*data.mean, *data.std], dtype=torch.float64)
    mark = digest({"images": some, "labels": data.labels, "ids": data.ids, "stats": stats})
    return f"{data!r} {mark.hex()[:16]}"


def weights_mark(net: nn.Module) -> str:
    """A short text that changes with any weight or buffer."""
    return f"{type(net).__name__} {digest(_tensors(net)).hex()[:16]}"


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    found = [*net.named_parameters(), *net.named_buffers()]
    return {plain_name(name): tensor for name, tensor in found}
