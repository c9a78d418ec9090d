"""The fused activations: each is one operator for autograd, torch.compile and torch.export."""

from fastbcd.ops.masked import masked_poly, masked_relu
from fastbcd.ops.soft import indicator_poly, soft_relu

__all__ = ["indicator_poly", "masked_poly", "masked_relu", "soft_relu"]
