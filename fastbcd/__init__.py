"""fastbcd: remove ReLUs from trained networks by Block Coordinate Descent, fast."""

from fastbcd import models, ops
from fastbcd.activations import MaskedPoly, MaskedReLU
from fastbcd.conversion import ConversionError, convert
from fastbcd.data import ImageData, load
from fastbcd.evaluation import accuracy
from fastbcd.finetuning import Finetune, Finetuner
from fastbcd.kernels import backends
from fastbcd.masking import MaskSet, Site, masks, set_masks
from fastbcd.scoring import Scores, score
from fastbcd.scoring.choice import Choice, choose

__version__ = "0.1.0"
__all__ = [
    "Choice",
    "ConversionError",
    "Finetune",
    "Finetuner",
    "ImageData",
    "MaskSet",
    "MaskedPoly",
    "MaskedReLU",
    "Scores",
    "Site",
    "accuracy",
    "backends",
    "choose",
    "convert",
    "load",
    "masks",
    "models",
    "ops",
    "score",
    "set_masks",
]
