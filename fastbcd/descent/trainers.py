"""What `bcd` does with the net between two steps."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from fastbcd.data.images import ImageData
from fastbcd.descent.settings import name_of
from fastbcd.descent.step import Step
from fastbcd.runs import fingerprint as snapshots
from fastbcd.training.finetune import Finetuner
from fastbcd.training.settings import Finetune
from fastbcd.training.trainer import check_same_classes, seeded

Train = Callable[[Step], Any]  # may return {"loss": ...}


def trainer(
    finetune: Any,
    net: nn.Module,
    data: ImageData,
    *,
    teacher: nn.Module | None,
    seed: int,
    progress: bool,
) -> Train | None:
    """The function that trains the net after a step's removal; None without training."""
    if isinstance(finetune, Finetune):
        tuner = Finetuner(net, data, finetune, teacher, seed=seed)
        return lambda step: tuner.run(step.number, progress=progress)
    if finetune is not None and not callable(finetune):
        raise TypeError(
            f"finetune is a {type(finetune).__name__}; give fastbcd.Finetune(...), a function "
            f"f(net, step), or None"
        )
    if teacher is not None:
        check_same_classes(net, data, teacher)
        warnings.warn("the teacher is not used: only Finetune distills", stacklevel=3)
    if finetune is None:
        return None

    def train(step: Step) -> Any:
        # Seeded, so that a step that is run again after a kill trains in the same way.
        with seeded(data.device, seed * 1_000_003 + step.number):
            return finetune(net, step)

    return train


def describe(finetune: Any, when: str, teacher: nn.Module | None) -> dict[str, Any]:
    """The settings of the training that can change the outcome, for config.json."""
    if not isinstance(finetune, Finetune):
        return {"finetune": finetune and name_of(finetune), "finetune_when": when}
    settings = dataclasses.asdict(finetune)
    del settings["teacher_cache"]
    mark = None if teacher is None else snapshots.weights_mark(teacher)
    return {"finetune": settings, "finetune_when": when, "teacher": mark}
