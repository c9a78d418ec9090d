"""The data that a net is scored and trained on, on the device of the net."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data


def data_for(net: nn.Module, data: Any) -> ImageData:
    """What `score` and `bcd` take, as ImageData with batches on the device of the net."""
    tensors = (*net.parameters(), *net.buffers())
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            "the net is on the meta device, so it has no weights; load them, for example with "
            "net.to_empty(device='cpu') and net.load_state_dict(...)"
        )
    images = as_data(data)
    if not tensors:
        return images
    return images.to(tensors[0].device)
