"""The fused activations: each is one operator for autograd, torch.compile and torch.export."""

from fastbcd.ops.masked import (
    indicator_poly,
    masked_line,
    masked_poly,
    masked_relu,
    soft_relu,
)

__all__ = ["indicator_poly", "masked_line", "masked_poly", "masked_relu", "soft_relu"]
