"""fastbcd: remove ReLUs from trained networks by Block Coordinate Descent, fast."""

from fastbcd import models, ops, private, recipes, report
from fastbcd.activations import MaskedPoly, MaskedReLU
from fastbcd.conversion import ConversionError, convert
from fastbcd.data import ImageData, load
from fastbcd.dense import Trained, train
from fastbcd.descent import Run, bcd, steps
from fastbcd.evaluation import accuracy
from fastbcd.finetuning import Finetune, Finetuner
from fastbcd.kernels import backends
from fastbcd.masking import MaskSet, Site, masks, set_masks
from fastbcd.proposals import Saliency
from fastbcd.records import Step
from fastbcd.saliencies import saliency
from fastbcd.schedules import Adaptive, Fraction
from fastbcd.scoring import Scores, score
from fastbcd.scoring.choice import Choice, choose
from fastbcd.search import Schedule
from fastbcd.starts.autorep import autorep
from fastbcd.starts.checkpoints import load_autorep, load_relupruner, load_snl
from fastbcd.starts.gates import to_poly
from fastbcd.starts.snl import snl
from fastbcd.starts.stages import StartingPoint

__version__ = "0.1.0"
__all__ = [
    "Adaptive",
    "Choice",
    "ConversionError",
    "Finetune",
    "Finetuner",
    "Fraction",
    "ImageData",
    "MaskSet",
    "MaskedPoly",
    "MaskedReLU",
    "Run",
    "Saliency",
    "Schedule",
    "Scores",
    "Site",
    "StartingPoint",
    "Step",
    "Trained",
    "accuracy",
    "autorep",
    "backends",
    "bcd",
    "choose",
    "convert",
    "load",
    "load_autorep",
    "load_relupruner",
    "load_snl",
    "masks",
    "models",
    "ops",
    "private",
    "recipes",
    "report",
    "saliency",
    "score",
    "set_masks",
    "snl",
    "steps",
    "to_poly",
    "train",
]
