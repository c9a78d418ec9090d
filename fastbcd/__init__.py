"""fastbcd: remove ReLUs from trained networks by Block Coordinate Descent, fast."""

from fastbcd import models, ops, private, report
from fastbcd.data.images import ImageData
from fastbcd.data.packed import pack
from fastbcd.data.sources import load
from fastbcd.descent.bcd import Run, bcd, steps
from fastbcd.descent.blocks import Blocks
from fastbcd.descent.linearize import linearize
from fastbcd.descent.proposals import Proposal, Saliency
from fastbcd.descent.saliency import saliency
from fastbcd.descent.schedules import Adaptive, Fraction, Schedule
from fastbcd.kernels import backends
from fastbcd.masking.activations import MaskedLine, MaskedPoly, MaskedReLU
from fastbcd.masking.convert import ConversionError, convert
from fastbcd.masking.fitted import to_line, to_poly
from fastbcd.masking.masks import MaskSet, Site, masks, set_masks
from fastbcd.runs.read import load_run
from fastbcd.runs.step import Epoch, Step
from fastbcd.runtime.version import __version__ as __version__
from fastbcd.scoring.accuracy import accuracy
from fastbcd.scoring.choose import Choice, choose
from fastbcd.scoring.engine import Engine
from fastbcd.scoring.score import Scores, score
from fastbcd.starts.autorep import autorep
from fastbcd.starts.checkpoints.formats import load_autorep, load_relupruner, load_snl
from fastbcd.starts.deepreduce import deepreduce
from fastbcd.starts.mask_training import StartingPoint
from fastbcd.starts.relupruner import relupruner
from fastbcd.starts.senet import senet
from fastbcd.starts.snl import snl
from fastbcd.training.dense import Trained, train
from fastbcd.training.finetuner import Finetuner
from fastbcd.training.settings import Finetune

__all__ = [
    "Adaptive", "Blocks", "Choice", "ConversionError", "Engine", "Epoch", "Finetune", "Finetuner",
    "Fraction", "ImageData", "MaskSet", "MaskedLine", "MaskedPoly", "MaskedReLU", "Proposal", "Run",
    "Saliency", "Schedule", "Scores", "Site", "StartingPoint", "Step", "Trained", "accuracy",
    "autorep", "backends", "bcd", "choose", "convert", "deepreduce", "linearize", "load",
    "load_autorep", "load_relupruner", "load_run", "load_snl", "masks", "models", "ops", "pack",
    "private", "relupruner", "report", "saliency", "score", "senet", "set_masks", "snl", "steps",
    "to_line", "to_poly", "train",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names, for tab completion."""
    return [*(name for name in globals() if name.startswith("__")), *__all__]
