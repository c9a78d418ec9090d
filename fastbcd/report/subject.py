"""Which net and which data set a run is about, so that the published curves can stand beside it.

A run directory says what they look like, not what they are called: the net is recognised by the
shapes of its sites in order, the data set by its images, classes and size. What is cut from a data
set is not recognised; `fastbcd report --data` says it then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fastbcd import models, recipes
from fastbcd.masking.masks import masks
from fastbcd.report import published
from fastbcd.runs.read import Stages

TITLES = {"resnet18": "ResNet18", "resnet20": "ResNet-20", "wide_resnet22_8": "Wide-ResNet-22-8",
          "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny-imagenet": "Tiny ImageNet",
          "fashion-mnist-mini": "Fashion-MNIST, small"}  # fmt: skip


class Images(NamedTuple):
    """What config.json says of the train images."""

    number: int
    channels: int
    height: int
    width: int
    classes: int


class Subject(NamedTuple):
    """Net and data set by their names in fastbcd.models and fastbcd.load; None: not known."""

    arch: str | None
    data: str | None

    def __str__(self) -> str:
        return f"{title_of(self.arch, 'a net')} on {title_of(self.data, 'images')}"

    def curves(self, metric: str) -> list[published.Curve]:
        """The published curves for this net and data set; none if one of them is not known."""
        if self.arch is None or self.data is None:
            return []
        return published.curves(self.arch, self.data, metric)


def title_of(name: str | None, otherwise: str = "not named by the run") -> str:
    """The usual spelling of a net's or data set's name.

    >>> title_of("wide_resnet22_8"), title_of("mine"), title_of(None)
    ('Wide-ResNet-22-8', 'mine', 'not named by the run')
    """
    return TITLES.get(name, name) if name else otherwise


def subject(chain: Stages, arch: str | None = None, data: str | None = None) -> Subject:
    """What a chain is about: as given, as its recipe says, or as recognised."""
    for name, value, known in (("arch", arch, models.NAMES), ("data", data, recipes.DATA)):
        if value is not None and value not in known:
            raise ValueError(f"{name}={value!r}; choose from {', '.join(known)}")
    recipe, config = chain.recipe or {}, chain.last.config
    images = images_of(config)
    return Subject(
        arch or recipe.get("arch") or (images and known_net(config, images)),
        data or recipe.get("data") or (images and known_data(images)),
    )


def images_of(config: dict[str, Any]) -> Images | None:
    """The train images in numbers."""
    data = config["data"]
    return Images(*(data[k] for k in ("images", "channels", "height", "width", "classes")))


def known_data(images: Images) -> str | None:
    """The data set that has so many such images.

    >>> known_data(Images(50_000, 3, 32, 32, 100)), known_data(Images(500, 3, 32, 32, 100))
    ('cifar100', None)
    """
    number, channels, height, width, classes = images
    wanted = recipes.DataShape(classes, height, channels, number)
    names = [name for name, shape in recipes.DATA.items() if shape == wanted]
    return names[0] if names and height == width else None


def known_net(config: dict[str, Any], images: Images) -> str | None:
    """The net of fastbcd.models whose sites have these shapes, in this order."""
    shapes = [tuple(shape) for shape in config["net"]["sites"].values()]
    for name in models.NAMES:
        with torch.device("meta"):
            net = models.build(name, images.classes, images.height, in_channels=images.channels)
        if [site.shape for site in masks(net).sites] == shapes:
            return name
    return None
