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
    """A copy of every parameter and buffer, masks included, on the CPU."""
    return {name: t.detach().cpu().contiguous().clone() for name, t in _tensors(net).items()}


def restore(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Write a snapshot back into the net, in place."""
    check_fits(net, tensors)
    with torch.no_grad():
        for name, tensor in _tensors(net).items():
            tensor.copy_(tensors[name])


def check_fits(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Refuse a snapshot of another net, naming the first difference."""
    mine, what = _tensors(net), "the snapshot is of another net"
    if mine.keys() != tensors.keys():
        first = min(mine.keys() ^ tensors.keys())
        raise ValueError(f"{what}: only the {'net' if first in mine else 'snapshot'} has {first!r}")
    for name, tensor in mine.items():
        own, other = tuple(tensor.shape), tuple(tensors[name].shape)
        if own != other:
            raise ValueError(f"{what}: {name} has shape {other}, the net's has {own}")


def run_config(
    kind: str, settings: dict[str, Any], net: nn.Module, *, data: ImageData,
    test: ImageData | None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """What config.json says about a run: its settings, its data and its net.

    kind: "run" (BCD), "dense", or a starting point's name. `arch` holds what fastbcd.models.build
    takes to build the net again, or {"model": "module:function"} of the command line; None for
    other nets.
    """
    wrapped = type(net).__name__ in ("DataParallel", "DistributedDataParallel")
    arch: Any = getattr(net.module if wrapped else net, "arch", None)
    known = isinstance(arch, dict) and (arch.get("name") in models.NAMES or "model" in arch)
    plain = known and all(isinstance(v, str | int | float) for v in arch.values())
    tensors = sorted(_tensors(net).items())
    return {
        "format": f"fastbcd.{kind} 2",
        "settings": settings,
        "data": _data_facts(data),
        "test": None if test is None else _data_facts(test),
        "net": {
            "arch": arch if plain else None,
            "sites": {site.name: list(site.shape) for site in masks(net).sites},
            "tensors": {name: f"{str(t.dtype)[6:]} {list(t.shape)}" for name, t in tensors},
        },
        **more,
    }


def _data_facts(data: ImageData) -> dict[str, Any]:
    """Size, normalisation and a digest of labels and some images; not the device: it may change."""
    stats = torch.tensor([*data.mean, *data.std], dtype=torch.float64)
    mark = digest({**data.identity(SAMPLED), "stats": stats})
    shape = list(data.images.shape[1:])
    channels, height, width = shape if len(shape) == 3 else [None] * 3
    return {
        **({"streamed": True} if data.streamed else {}),
        "name": data.name, "images": len(data), "channels": channels, "height": height,
        "width": width, "classes": data.classes, "dtype": str(data.images.dtype)[6:],
        "mean": list(data.mean), "std": list(data.std), "digest": mark.hex()[:16],
        **({} if len(shape) == 3 else {"shape": shape}),
    }  # fmt: skip


def weights_mark(net: nn.Module | None) -> str | None:
    """A short text that changes with any weight or buffer; None without a net."""
    return None if net is None else f"{type(net).__name__} {digest(_tensors(net)).hex()[:16]}"


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    found = dict((*net.named_parameters(), *net.named_buffers()))
    return {plain: found[name] for name, plain in plain_names(found).items()}
