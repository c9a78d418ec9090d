"""The data that a net is scored and trained on, on the device of the net."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from fastbcd.runtime.dtypes import device_of

_shapes: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()


def data_for(net: nn.Module, data: Any) -> ImageData:
    """What `score` and `bcd` take, as ImageData with batches on the device of the net."""
    device = device_of(net)
    images = as_data(data)
    if not len(images):
        raise ValueError(f"there are no images in the data, {images}")
    remember_shape(net, tuple(images.images.shape[1:]))
    if device is None:
        return images
    return images.to(device)


def remember_shape(net: nn.Module, shape: tuple[int, ...]) -> None:
    """Images of this shape are what the net takes."""
    _shapes[net] = shape


def image_shape(net: nn.Module) -> tuple[int, ...] | None:
    """The shape of the images that the net was last used with; None if it was not.

    >>> image_shape(fastbcd.models.resnet20(10, image_size=8))
    (3, 8, 8)
    """
    if net in _shapes:
        return _shapes[net]
    arch = getattr(net, "arch", None) or {}
    if "image_size" in arch:  # of fastbcd.models
        return (arch["in_channels"], arch["image_size"], arch["image_size"])
    return getattr(net, "example_shape", None)  # of `convert`
