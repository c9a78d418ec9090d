"""Triton kernels of the fused activations, for CUDA (or ROCm) tensors.

With TRITON_INTERPRET=1 set before the import they are interpreted, on CPU tensors.
"""

from __future__ import annotations

import torch
import triton

from .. import INTERPRETED
from .kinks import kinks
from .poly import poly_backward, poly_forward
from .relu import relu_backward, relu_forward
from .saliency import saliency_backward
from .soft import indicator_backward, soft_backward, soft_forward

__all__ = [
    "DTYPES",
    "indicator_backward",
    "kinks",
    "poly_backward",
    "poly_forward",
    "relu_backward",
    "relu_forward",
    "saliency_backward",
    "soft_backward",
    "soft_forward",
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _describe() -> str:
    if INTERPRETED:
        return f"Triton {triton.__version__}, interpreted on the CPU"
    if torch.cuda.is_available():
        return f"Triton {triton.__version__} on {torch.cuda.get_device_name()}"
    return f"Triton {triton.__version__}, no device"


DESCRIPTION = _describe()
