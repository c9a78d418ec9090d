"""What trains the net after a removal: `Finetune`, a function, the body of a loop, or nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from fastbcd.data.images import ImageData
from fastbcd.descent.problem import Problem
from fastbcd.runs.fingerprint import weights_mark
from fastbcd.runs.step import Epoch, Step
from fastbcd.runtime import ranks
from fastbcd.runtime.settings import described
from fastbcd.scoring.compiled import drop
from fastbcd.training.finetuner import Finetuner
from fastbcd.training.repeat import seeded
from fastbcd.training.settings import Finetune
from fastbcd.training.teacher import Distillation

Function = Callable[[nn.Module, Step], Any]
Callback = Callable[[Step | Epoch], Any]


class Training:
    """No training that `bcd` calls, as described; the base of the others.

    epochs: of one step, for the plan; None: unknown. batches: of an epoch.
    """

    batches = 1

    def __init__(
        self, described: str | None = None, *, epochs: float | None = 0.0
    ) -> None:
        self.described = described
        self.epochs = epochs

    def __call__(self, step: Step, **how: Any) -> None:
        """Train the net in place after the step's removal, and complete the step's record.

        how: of `Finetuner.run`; only `Tuned` has any use for it.
        """

    def rehearse(self, images: ImageData, ranks: int = 1) -> None:
        """An epoch of a copy of the net on some images, to be timed.

        ranks: by how many the batches are shared; they are those of one of them.
        """

    def settle(self, net: nn.Module) -> None:
        """After the training: batch norm has seen other images on each rank."""
        ranks.agree(net.buffers())

    def answers(self, data: ImageData) -> Distillation | None:
        """The teacher's answers to these images, if the net distils from one."""
        return None

    def describe(self) -> dict[str, Any]:
        """What config.json records."""
        return {"finetune": self.described}


class Own(Training):
    """A function of the user, f(net, step), that may return {"loss": …}."""

    def __init__(self, problem: Problem, function: Function, seed: int) -> None:
        super().__init__(described(function), epochs=None)
        self.problem = problem
        self.function = function
        self.seed = seed

    def __call__(self, step: Step, **how: Any) -> None:
        net = self.problem.net
        drop(net)  # what was made of other weights: its memory is needed now
        # Seeded, so that a step that is run again after a kill trains in the same way.
        with seeded(self.problem.train.device, self.seed * 1_000_003 + step.number):
            report = self.function(net, step)
        if isinstance(report, dict):
            step.train_loss = report.get("loss")


class Tuned(Training):
    """Training by `Finetune`."""

    def __init__(
        self,
        problem: Problem,
        settings: Finetune,
        teacher: nn.Module | None,
        *,
        seed: int,
        progress: bool,
        report: Callback,
    ) -> None:
        super().__init__(epochs=settings.epochs)
        self.teacher = teacher
        self.progress = progress
        self.report = report if settings.epochs > 1 else None
        self.tuner = Finetuner(
            problem.net,
            problem.train,
            settings,
            teacher,
            seed=seed,
            loss=problem.criterion.loss,
        )
        self.batches = len(self.tuner.sizes)

    def __call__(self, step: Step, **how: Any) -> None:
        drop(self.tuner.net)
        shown: Any = {"progress": self.progress, "report": self.report}
        report = self.tuner.run(step.number, **shown, **how)
        step.epochs = report["epochs"]
        step.train_loss = report.get("loss")

    def settle(self, net: nn.Module) -> None:
        """`Finetuner` has averaged what the ranks' batches made."""

    def rehearse(self, images: ImageData, ranks: int = 1) -> None:
        tuner = self.tuner
        size = max(1, tuner.settings.batch_size // ranks)
        settings = replace(tuner.settings, epochs=1, compile=False, batch_size=size)
        net = copy.deepcopy(tuner.net)
        Finetuner(net, images, settings, self.teacher, loss=tuner.criterion).run(0)

    def answers(self, data: ImageData) -> Distillation | None:
        if self.teacher is None:
            return None
        return Distillation.of(self.teacher, data, self.tuner.settings)

    def describe(self) -> dict[str, Any]:
        return {
            "finetune": self.tuner.settings.describe(),
            "teacher": weights_mark(self.teacher),
        }


def training_of(
    problem: Problem,
    finetune: Finetune | Function | Training | None,
    teacher: nn.Module | None,
    **options: Any,
) -> Training:
    """The training that `finetune` asks for. options: of `Tuned`."""
    if isinstance(finetune, Finetune):
        return Tuned(problem, finetune, teacher, **options)
    if teacher is not None:
        raise ValueError("only Finetune distils from a teacher: leave teacher= out")
    if finetune is None:
        return Training()
    if isinstance(finetune, Training):
        return finetune
    if not callable(finetune):
        raise TypeError(
            f"finetune is a {type(finetune).__name__}; give fastbcd.Finetune(...), a function "
            f"f(net, step), or None"
        )
    return Own(problem, finetune, options["seed"])
