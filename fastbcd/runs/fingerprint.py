"""Snapshots of a net, and the facts about net and data that config.json records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbcd import models
from fastbcd.data.images import ImageData
from fastbcd.masking.masks import masks, plain_names
from fastbcd.runtime.ranks import digest

SAMPLED = 256  # images whose pixels enter the digest of a data set


def take(net: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer, masks included, on the CPU.

    >>> sorted(take(fastbcd.MaskedReLU(2)))
    ['mask']
    """
    return {name: t.detach().cpu().contiguous().clone() for name, t in _tensors(net).items()}


def restore(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Write a snapshot back into the net, in place."""
    check_fits(net, tensors)
    with torch.no_grad():
        for name, tensor in _tensors(net).items():
            tensor.copy_(tensors[name])


def check_fits(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Refuse a snapshot of another net, naming the first difference."""
    mine = _tensors(net)
    if mine.keys() != tensors.keys():
        first = min(mine.keys() ^ tensors.keys())
        where = "the net" if first in mine else "the snapshot"
        raise ValueError(f"the snapshot is of another net: only {where} has {first!r}")
    for name, tensor in mine.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(
                f"the snapshot is of another net: {name} has shape {tuple(tensors[name].shape)}, "
                f"the net's has {tuple(tensor.shape)}"
            )


def run_config(
    kind: str,
    settings: dict[str, Any],
    net: nn.Module,
    *,
    data: ImageData,
    test: ImageData | None,
    **more: Any,
) -> dict[str, Any]:
    """What config.json says about a run: its settings, its data and its net.

    kind: "run" (BCD), "dense", "snl" or "autorep".
    """
    return {
        "format": f"fastbcd.{kind} 2",
        "settings": settings,
        "data": data_facts(data),
        "test": None if test is None else data_facts(test),
        "net": net_facts(net),
        **more,
    }


def net_facts(net: nn.Module) -> dict[str, Any]:
    """Architecture, sites, and every tensor's dtype and shape.

    `arch` holds what fastbcd.models.build takes to build the net again, or {"model":
    "module:function"} of the command line; None for other nets.
    """
    tensors = {
        name: f"{str(t.dtype)[6:]} {list(t.shape)}" for name, t in sorted(_tensors(net).items())
    }
    wrapped = type(net).__name__ in ("DataParallel", "DistributedDataParallel")
    arch: Any = getattr(net.module if wrapped else net, "arch", None)
    known = isinstance(arch, dict) and (arch.get("name") in models.NAMES or "model" in arch)
    plain = known and all(isinstance(v, str | int | float) for v in arch.values())
    return {
        "arch": arch if plain else None,
        "sites": {site.name: list(site.shape) for site in masks(net).sites},
        "tensors": tensors,
    }


def data_facts(data: ImageData) -> dict[str, Any]:
    """Name, size and normalisation, and a digest of the labels and of some of the images.

    The device is not among them: a run continues on another one. Inputs that are not images have
    `shape` and None for channels, height and width.
    """
    some = data.images[:: max(1, len(data) // SAMPLED)]
    stats = torch.tensor([*data.mean, *data.std], dtype=torch.float64)
    mark = digest({"images": some, "labels": data.labels, "ids": data.ids, "stats": stats})
    shape = list(data.images.shape[1:])
    channels, height, width = shape if len(shape) == 3 else [None] * 3
    return {
        "name": data.name, "images": len(data), "channels": channels, "height": height,
        "width": width, "classes": data.classes, "dtype": str(data.images.dtype)[6:],
        "mean": list(data.mean), "std": list(data.std), "digest": mark.hex()[:16],
        **({} if len(shape) == 3 else {"shape": shape}),
    }  # fmt: skip


def weights_mark(net: nn.Module) -> str:
    """A short text that changes with any weight or buffer."""
    return f"{type(net).__name__} {digest(_tensors(net)).hex()[:16]}"


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    found = dict((*net.named_parameters(), *net.named_buffers()))
    return {plain: found[name] for name, plain in plain_names(found).items()}
