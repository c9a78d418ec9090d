"""What the tests of the starting points share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fastbcd
from fastbcd.data.sources import as_data
from fastbcd.descent.budget import limits_of
from fastbcd.masking.fitted import to_poly
from fastbcd.runs import fingerprint as snapshots
from fastbcd.starts.method import Method
from fastbcd.training.loop import Session
from fastbcd.training.settings import Finetune
from helpers.nets import images, make

SHORT = Finetune(epochs=1, padding=1, teacher_cache=10**7)
NONE = Finetune(epochs=0, padding=1, teacher_cache=10**7)
# Of snl: a handful of epochs, in seconds.
QUICK = {"lr": 0.03, "lambda0": 3e-3, "kappa": 1.5, "batch_size": 32, "finetune": SHORT}
# Of every method: a few short epochs, and the kind of net that it trains in place.
METHODS: dict[str, dict[str, Any]] = {
    "snl": {**QUICK, "max_epochs": 6},
    "autorep": {"epochs": 4, "lr": 0.1, "penalty": 20.0},
    "deepreduce": {"epochs": 7, "trial_epochs": 1, "lr": 0.02},
    "senet": {"epochs": 4, "every": 2, "lr": 0.02},
    "relupruner": {"epochs": 4, "warmup": 1, "interval": 1, "lr": 0.01},
}
KIND = {name: "poly" if name == "autorep" else "resnet" for name in METHODS}


def start(method: str, net: nn.Module, budget: Any, **changed: Any) -> fastbcd.StartingPoint:
    """A short run of a method on 48 images."""
    settings = {"data": data(48), "batch_size": 16, "finetune": SHORT, **METHODS[method]}
    return getattr(fastbcd, method)(net, budget=budget, **{**settings, **changed})


def made(method: type[Method], settings: Any, net: nn.Module, budget: int, n: int = 8) -> Any:
    """A method before its first epoch."""
    return method(net, data(n), limits_of(budget, net), settings)


def data(n: int = 96):
    return as_data(images(n))


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return snapshots.take(net)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Other(nn.Module):
    """A teacher with seven classes."""

    def forward(self, x):
        return x.flatten(1)[:, :7]


def stopped_at(epoch: int, step: int | None = None) -> Callable:
    """`Session.epoch` that raises KeyboardInterrupt at this epoch, of this step or of any."""
    whole = Session.epoch

    def interrupted(self, number, *rest, **more):
        if number == epoch and step in (None, more.get("step", 0)):
            raise KeyboardInterrupt
        return whole(self, number, *rest, **more)

    return interrupted


def small_net() -> nn.Module:
    return make("mlp")


def poly_net() -> nn.Module:
    return to_poly(small_net())


def write_images(path: Path) -> str:
    """An .npz file with both splits."""
    g = np.random.default_rng(0)
    splits = {}
    for split, n in (("train", 60), ("test", 20)):
        splits[f"{split}_images"] = g.integers(0, 256, (n, 8, 8, 3), np.uint8)
        splits[f"{split}_labels"] = np.arange(n) % 5
    np.savez(path, **splits)
    return str(path)
