"""The dtype and the device of a net."""

from __future__ import annotations

import torch
from torch import nn


def dtype_of(net: nn.Module) -> torch.dtype:
    """The dtype of the net's first floating-point parameter; float32 if there is none."""
    return next(
        (p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32
    )


def device_of(net: nn.Module) -> torch.device | None:
    """The device of the net's first tensor, None without any; refuses the meta device."""
    if not isinstance(net, nn.Module):
        raise TypeError(
            f"the net is {net!r}; give a module, such as ResNet(), not its class"
        )
    devices = [tensor.device for tensor in (*net.parameters(), *net.buffers())]
    if torch.device("meta") in devices:
        raise ValueError(
            f"{type(net).__name__} is on the meta device, so it has no weights; load them, for "
            f"example with net.to_empty(device='cpu') and net.load_state_dict(...)"
        )
    return devices[0] if devices else None
