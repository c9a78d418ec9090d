"""fastbcd: remove ReLUs from trained networks by Block Coordinate Descent, fast."""

from fastbcd import ops
from fastbcd.activations import MaskedPoly, MaskedReLU
from fastbcd.conversion import ConversionError, convert
from fastbcd.kernels import backends
from fastbcd.masking import MaskSet, Site, masks, set_masks

__version__ = "0.1.0"
__all__ = [
    "ConversionError",
    "MaskSet",
    "MaskedPoly",
    "MaskedReLU",
    "Site",
    "backends",
    "convert",
    "masks",
    "ops",
    "set_masks",
]
