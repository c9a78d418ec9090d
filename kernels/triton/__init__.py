"""The Triton kernels, for CUDA (or ROCm) tensors.

With TRITON_INTERPRET=1 set before the import they are interpreted, on CPU tensors.
"""

from __future__ import annotations

import torch
import triton

from .. import INTERPRETED
from .indicator_poly import indicator_poly_backward
from .kink import kink
from .masked_poly import masked_poly_backward, masked_poly_forward
from .masked_relu import masked_relu_backward, masked_relu_forward
from .saliency import saliency_backward
from .soft_relu import soft_relu_backward, soft_relu_forward

indicator_poly_forward = masked_poly_forward

__all__ = [
    "DTYPES",
    "indicator_poly_backward",
    "indicator_poly_forward",
    "kink",
    "masked_poly_backward",
    "masked_poly_forward",
    "masked_relu_backward",
    "masked_relu_forward",
    "saliency_backward",
    "soft_relu_backward",
    "soft_relu_forward",
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TRUSTED = INTERPRETED  # else compared with the reference at first use (fastbcd.ops.selfcheck)


def describe() -> str:
    """What runs, in one line. Not called on import: the name of a device initialises CUDA."""
    if INTERPRETED:
        return f"Triton {triton.__version__}, interpreted on the CPU"
    if torch.cuda.is_available():
        return f"Triton {triton.__version__} on {torch.cuda.get_device_name()}"
    return f"Triton {triton.__version__}, no device"
