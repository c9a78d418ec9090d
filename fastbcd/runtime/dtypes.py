"""The dtype of a net."""

from __future__ import annotations

import torch
from torch import nn


def dtype_of(net: nn.Module) -> torch.dtype:
    """The dtype of the net's first floating-point parameter; float32 if there is none."""
    return next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)
