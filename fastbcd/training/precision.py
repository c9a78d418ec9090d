"""The dtype and memory layout that a net is trained in, and mixed precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fastbcd.runtime.dtypes import dtype_of
from fastbcd.training.settings import Finetune


def training_dtype(net: nn.Module) -> torch.dtype:
    """The dtype that a net is trained in: float64 if it has it, else float32."""
    return torch.promote_types(dtype_of(net), torch.float32)


def autocast_dtype(settings: Finetune, device: torch.device) -> torch.dtype | None:
    """The dtype of mixed precision, or None.

    >>> autocast_dtype(Finetune(amp="fp16"), torch.device("cpu"))
    torch.float16
    """
    if settings.amp == "fp16":
        return torch.float16
    if settings.amp or (settings.amp is None and device.type == "cuda"):
        return torch.bfloat16
    return None


def scaler(dtype: torch.dtype | None, device: torch.device) -> torch.amp.GradScaler:
    """Scales the loss in float16, so that gradients do not vanish; does nothing otherwise."""
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)


@contextmanager
def mixed(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Autocast to this dtype; None: none."""
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        yield
    torch.clear_autocast_cache()  # of weights, which only the outermost autocast clears


@contextmanager
def wide(net: nn.Module) -> Iterator[None]:
    """Tensors of 16 bits become float32; on exit they are rounded to the dtype they had."""
    tensors = (*net.parameters(), *net.buffers())
    dtypes = {t: t.dtype for t in tensors if t.dtype in (torch.float16, torch.bfloat16)}
    try:
        for tensor in dtypes:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in dtypes.items():
            tensor.data = tensor.data.to(dtype)


@contextmanager
def laid_out(net: nn.Module, memory_format: torch.memory_format) -> Iterator[None]:
    """The weights of convolutions lie in this format; on exit they are contiguous again."""
    weights = [p for p in net.parameters() if p.ndim == 4 and p.is_contiguous()]
    try:
        for weight in weights:
            weight.data = weight.data.contiguous(memory_format=memory_format)
        yield
    finally:
        for weight in weights:
            weight.data = weight.data.contiguous()
