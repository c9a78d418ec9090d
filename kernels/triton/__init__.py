"""The Triton kernels, for CUDA (or ROCm) tensors.

With TRITON_INTERPRET=1 set before the import they are interpreted, on CPU tensors.
"""

from __future__ import annotations

import torch
import triton

from .. import INTERPRETED
from .kink import kink
from .masked import masked_backward, masked_forward

__all__ = ["DTYPES", "kink", "masked_backward", "masked_forward"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TRUSTED = (
    INTERPRETED  # else compared with the reference at first use (fastbcd.ops.selfcheck)
)


def describe() -> str:
    """What runs, in one line. Not called on import: the name of a device initialises CUDA."""
    if INTERPRETED:
        return f"Triton {triton.__version__}, interpreted on the CPU"
    if torch.cuda.is_available():
        return f"Triton {triton.__version__} on {torch.cuda.get_device_name()}"
    return f"Triton {triton.__version__}, no device"
