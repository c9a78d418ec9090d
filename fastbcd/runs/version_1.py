"""Names for runs of version 1, which recorded sizes only: the data set and the network."""

from __future__ import annotations

from typing import Any

import torch

from fastbcd import models
from fastbcd.masking.masks import masks

SIZE = ("images", "channels", "height", "width", "classes")
TRAIN_SETS = {
    (50_000, 3, 32, 32, 10): "cifar10", (50_000, 3, 32, 32, 100): "cifar100",
    (100_000, 3, 64, 64, 200): "tiny-imagenet", (8_000, 1, 28, 28, 10): "fashion-mnist-mini",
}  # fmt: skip


def add_names(config: dict[str, Any]) -> None:
    """Fill in data.name and net.arch of a checked configuration, where the sizes tell them."""
    data, net = config["data"], config["net"]
    data["name"] = TRAIN_SETS.get(tuple(data[field] for field in SIZE))
    arch = {
        "num_classes": data["classes"], "image_size": data["height"],
        "in_channels": data["channels"],
        "replacement": "poly" if any(n.endswith(".coef") for n in net["tensors"]) else "identity",
    }  # fmt: skip
    for name in models.NAMES:
        try:
            with torch.device("meta"):
                made = models.build(name, **arch)
        except (ValueError, RuntimeError, ArithmeticError):  # no net takes such images
            continue
        if {site.name: list(site.shape) for site in masks(made).sites} == net["sites"]:
            net["arch"] = {"name": name, **arch}
