"""The data that a net is scored and trained on, on the device of the net."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastbcd.data.host import HostData
from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from fastbcd.runtime.limits import default_memory


def data_for(net: nn.Module, data: Any) -> ImageData:
    """What `score` and `bcd` take, as ImageData on the device of the net.

    Images that would take more than half of a GPU's memory stay on the host.
    """
    tensors = (*net.parameters(), *net.buffers())
    if any(t.is_meta for t in tensors):
        raise ValueError(
            "the net is on the meta device, so it has no weights; load them, for example with "
            "net.to_empty(device='cpu') and net.load_state_dict(...)"
        )
    images, device = as_data(data), tensors[0].device if tensors else torch.device("cpu")
    moves = type(images) is ImageData and images.device.type == "cpu" and device.type == "cuda"
    if moves and images.images.nbytes > default_memory(device) // 2:
        return HostData(images, device)
    return images.to(device) if tensors else images
