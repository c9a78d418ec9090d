"""The data that a net is scored and trained on, on the device of the net."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from fastbcd.runtime.dtypes import device_of


def data_for(net: nn.Module, data: Any) -> ImageData:
    """What `score` and `bcd` take, as ImageData with batches on the device of the net."""
    device = device_of(net)
    images = as_data(data)
    if not len(images):
        raise ValueError(f"there are no images in the data, {images}")
    if device is None:
        return images
    return images.to(device)
