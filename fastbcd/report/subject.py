"""The names of a run's net and data set, which decide the published curves beside it."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from fastbcd import models, recipes
from fastbcd.report import published
from fastbcd.runs.read import Stages

TITLES = {"resnet18": "ResNet18", "resnet20": "ResNet-20", "wide_resnet22_8": "Wide-ResNet-22-8",
          "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny-imagenet": "Tiny ImageNet",
          "fashion-mnist-mini": "Fashion-MNIST, small"}  # fmt: skip
SIZES = ("name", "num_classes", "image_size", "in_channels", "replacement")


class Subject(NamedTuple):
    """Net and data set; None: the run did not record it."""

    arch: str | None
    data: str | None

    def __str__(self) -> str:
        return f"{title_of(self.arch, 'a net')} on {title_of(self.data, 'images')}"

    def curves(self, metric: str) -> list[published.Curve]:
        """The published curves for this net and data set."""
        return published.curves(self.arch or "", self.data or "", metric)


def subject(run: Stages, arch: str | None = None, data: str | None = None) -> Subject:
    """The names given, or those that the run recorded."""
    for name, value, known in (("arch", arch, models.NAMES), ("data", data, recipes.DATA)):
        if value is not None and value not in known:
            raise ValueError(f"{name}={value!r}; choose from {', '.join(known)}")
    config = run.last.config
    return Subject(arch or _net_name(config["net"]["arch"] or {}), data or config["data"]["name"])


def _net_name(arch: dict[str, Any]) -> str | None:
    """The recorded name, with the options that are not the published net's.

    >>> _net_name(fastbcd.models.resnet20(width=4).arch), _net_name({"model": "nets:small"})
    ('resnet20 (width 4)', 'nets:small')
    """
    name = arch.get("name")
    if name not in models.NAMES:
        return arch.get("model")
    usual = inspect.signature(getattr(models, name)).parameters
    options = {k: v for k, v in arch.items() if k in usual and k not in SIZES}
    changed = [f"{k} {v}" for k, v in options.items() if v != usual[k].default]
    return f"{name} ({', '.join(changed)})" if changed else name


def title_of(name: str | None, otherwise: str = "not recorded") -> str:
    """The usual spelling of a net's or data set's name.

    >>> title_of("wide_resnet22_8"), title_of("mine"), title_of(None)
    ('Wide-ResNet-22-8', 'mine', 'not recorded')
    """
    return TITLES.get(name, name) if name else otherwise
