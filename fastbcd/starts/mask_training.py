"""What SNL and AutoReP have in common: train masks, decide on the bits, fine-tune, save.

A `Method` defines how an epoch trains and which ReLUs are kept; `MaskTraining.run` does the rest.
With a run directory every epoch is saved with the optimizer's state, and the same call resumes
from there: the result is the same as without the interruption.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from tqdm import tqdm

from fastbcd.data.sources import as_data
from fastbcd.masking.masks import MaskSet, masks, set_masks
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.directory import RunDirectory, check_resume, open_run
from fastbcd.runs.files import read_state
from fastbcd.runtime import ranks
from fastbcd.runtime.validate import check_whole
from fastbcd.scoring.accuracy import accuracy, check_classes
from fastbcd.starts.overlaps import Overlaps
from fastbcd.training.settings import Finetune
from fastbcd.training.teacher import TeacherLogits
from fastbcd.training.trainer import (
    NET,
    Trainer,
    check_trainable,
    cosine,
    epoch_line,
    repeatable,
    with_prefix,
)

DECIDED, TUNED, FINAL = "decided", "finetune", "final"  # phases; an epoch of masks has none


@dataclass
class StartingPoint:
    """A net at its budget, and how it got there.

    history: one record per epoch, with what the paper plots: count, decrease, lambda, iou, ….
    accuracy: percent on `measured_on` of the net with trained masks ("trained"), right after they
    are cut to bits ("thresholded"), and after the fine-tune ("final").
    overlaps: [count, count, IoU] of random pairs of the epochs' masks.
    finetune: one record per epoch of the fine-tune.

    >>> masks = fastbcd.MaskSet.full({"relu": (8,)})
    >>> StartingPoint(nn.Identity(), masks, [], {"final": 78.45}, "test")
    StartingPoint(8 ReLUs after 0 epochs; on the test set: final 78.45 %)
    """

    model: nn.Module
    masks: MaskSet
    history: list[dict[str, Any]]
    accuracy: dict[str, float]
    measured_on: str
    overlaps: list[list[float]] = field(default_factory=list)
    finetune: list[dict[str, Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        steps = ", ".join(f"{name} {value:.2f} %" for name, value in self.accuracy.items())
        kept = f"{self.masks.count():,} ReLUs after {len(self.history)} epochs"
        return f"StartingPoint({kept}; on the {self.measured_on} set: {steps})"


class Method(Protocol):
    """How masks are trained. `model` has the net's own weights and trainable activations."""

    model: nn.Module

    def begin(self, history: list[dict[str, Any]]) -> None:
        """Continue after these epochs; the model's own tensors are already restored."""

    def done(self, history: list[dict[str, Any]]) -> bool:
        """Whether the mask training is over."""

    def epoch(self, trainer: Trainer, epoch: int, bar: Any) -> dict[str, Any]:
        """Train for an epoch and return its record, with "count", "lambda" and "loss"."""

    def bits(self) -> Tensor:
        """The current mask, bool [total]."""

    def decide(self, history: list[dict[str, Any]]) -> MaskSet:
        """Which ReLUs are kept."""


@dataclass(kw_only=True)
class MaskTraining:
    """One run of a method: the net, the data and the settings."""

    name: str
    settings: dict[str, Any]  # of the method: what decides the outcome, for config.json
    net: nn.Module
    data: Any
    test: Any
    teacher: nn.Module | None
    finetune: Finetune | None
    batch_size: int
    seed: int
    run_dir: str | os.PathLike[str] | None
    resume: str | bool
    progress: bool

    def run(self, make: Callable[[nn.Module], Method]) -> StartingPoint:
        """Train the masks, cut them to bits, fine-tune. After an exception the net is as before.

        make: returns the method for the net, which has its weights from the start of the run.
        """
        self._check()
        given = snapshots.take(self.net)
        make(self.net)  # checks its settings before anything is written
        with closing(self._open()) as run:
            ranks.check_same("the weights and masks", given)
            try:
                return self._train(run, given, make)
            except BaseException:
                snapshots.restore(self.net, given)
                raise

    def _check(self) -> None:
        check_whole("batch_size", self.batch_size, 1)
        check_whole("seed", self.seed, 0)
        check_resume(self.resume)
        self.data = as_data(self.data)
        self.tuning = Finetune(epochs=0) if self.finetune is None else self.finetune
        check_trainable(self.net, self.data, self.tuning, self.teacher)
        self.measured = self.data  # what accuracies are measured on
        if self.test is not None:
            self.measured = self.test = as_data(self.test)
            check_classes(self.net, self.test, "the net, asked about the test set,")
        self.progress = self.progress and ranks.rank() == 0

    def _train(
        self, run: RunDirectory, given: dict[str, Tensor], make: Callable[[nn.Module], Method]
    ) -> StartingPoint:
        if run.state is None:
            run.save(0, given, {})
        elif _phase(run.history, FINAL):
            snapshots.restore(self.net, run.state.tensors)
            return self._result(run.history)
        else:
            snapshots.restore(self.net, _start_of(run, given))
        teacher = self.net if self.teacher is None else self.teacher  # it is copied
        logits = TeacherLogits.for_settings(teacher, self.data, self.tuning)
        if not _phase(run.history, DECIDED):
            self._train_masks(run, make(self.net), logits)
        self._fine_tune(run, logits)
        return self._result(run.history)

    def _train_masks(self, run: RunDirectory, method: Method, logits: TeacherLogits | None) -> None:
        """Train the masks to the end and write the bits into the net."""
        settings = dataclasses.replace(
            self.tuning, optimizer="adam", weight_decay=0.0, batch_size=self.batch_size
        )
        trainer = self._trainer(method.model, settings, logits)
        history, seen = run.history, Overlaps(masks(self.net).sites)
        with trainer.session():
            if run.state is not None and run.state.step:
                trainer.load(run.state.tensors)
                seen.load(run.state.tensors, run.state.step)
            method.begin(history)
            while not method.done(history):
                begin, epoch = time.perf_counter(), len(history)
                before = history[-1]["count"] if history else masks(self.net).count()
                record: dict[str, Any] = {"number": epoch + 1, "epoch": epoch}
                with self._epoch(trainer, epoch, self.name) as bar:
                    record |= method.epoch(trainer, epoch, bar)
                record["decrease"] = before - record["count"]
                record["iou"] = seen.add(epoch, method.bits())
                self._measure(method.model, record, begin)
                self._save(run, record, lambda: {**trainer.state(), **seen.state()})
            found = {"trained": accuracy(method.model, self.measured)}
        chosen = method.decide(history)
        set_masks(self.net, chosen)
        found["thresholded"] = accuracy(self.net, self.measured)
        decided = {"number": len(history) + 1, "phase": DECIDED, "count": chosen.count()}
        decided |= {"accuracy": found, "overlaps": seen.pairs(self.seed)}
        self._save(run, decided, lambda: with_prefix(snapshots.take(self.net), NET))

    def _fine_tune(self, run: RunDirectory, logits: TeacherLogits | None) -> None:
        """What `Finetuner.run` does, with a record and a saved state per epoch."""
        s, history = self.tuning, run.history
        trainer = self._trainer(self.net, s, logits)
        with trainer.session():
            if run.state is not None and run.state.record.get("phase") in (DECIDED, TUNED):
                trainer.load(run.state.tensors)
            for epoch in range(len(_phase(history, TUNED)), s.epochs):
                begin, lr = time.perf_counter(), cosine(s.lr, epoch, s.epochs)
                record = {"number": len(history) + 1, "phase": TUNED, "epoch": epoch, "lr": lr}
                with self._epoch(trainer, epoch, "fine-tune") as bar:
                    record["loss"] = trainer.epoch(epoch, lr, step=1, bar=bar)
                self._measure(self.net, record, begin)
                self._save(run, record, trainer.state)
        (decided,) = _phase(history, DECIDED)
        final = {**decided, "number": len(history) + 1, "phase": FINAL}
        final["accuracy"] = {**decided["accuracy"], "final": accuracy(self.net, self.measured)}
        self._save(run, final, lambda: snapshots.take(self.net))

    def _trainer(self, net: nn.Module, settings: Finetune, logits: TeacherLogits | None) -> Trainer:
        return Trainer(
            net, self.data, settings, teacher=logits, seed=self.seed, fused_optimizer=False
        )

    @contextmanager
    def _epoch(self, trainer: Trainer, epoch: int, what: str) -> Iterator[Any]:
        """Seeded by the epoch, with a bar."""
        bar = tqdm(total=len(trainer.sizes), disable=not self.progress, desc=what)
        with bar, repeatable(self.data.device, self.seed, epoch):
            yield bar

    def _measure(self, net: nn.Module, record: dict[str, Any], begin: float) -> None:
        """Complete the record of an epoch and print it."""
        if self.test is not None:
            record["test_accuracy"] = accuracy(net, self.test)
        record["seconds"] = {"epoch": time.perf_counter() - begin}
        if self.progress:
            tqdm.write(epoch_line(title(record), record))

    def _save(
        self, run: RunDirectory, record: dict[str, Any], tensors: Callable[[], dict[str, Tensor]]
    ) -> None:
        """Finish an epoch; tensors are only copied if they are written or compared."""
        state = tensors() if self.run_dir is not None or ranks.world() > 1 else {}
        ranks.check_same("the weights and masks", state)
        run.save(record["number"], state, record)

    def _open(self) -> RunDirectory:
        tuning = {k: v for k, v in dataclasses.asdict(self.tuning).items() if k != "teacher_cache"}
        common = {"batch_size": self.batch_size, "seed": self.seed, "finetune": tuning}
        return open_run(
            self.name, {**self.settings, **common}, self.net, data=self.data, test=self.test,
            run_dir=self.run_dir, resume=self.resume,
            teacher=None if self.teacher is None else snapshots.weights_mark(self.teacher),
        )  # fmt: skip

    def _result(self, history: list[dict[str, Any]]) -> StartingPoint:
        final = history[-1]
        return StartingPoint(
            self.net, masks(self.net), _phase(history, None), final["accuracy"],
            measured_on="train" if self.test is None else "test", overlaps=final["overlaps"],
            finetune=_phase(history, TUNED),
        )  # fmt: skip


def _phase(history: list[dict[str, Any]], phase: str | None) -> list[dict[str, Any]]:
    return [record for record in history if record.get("phase") == phase]


def _start_of(run: RunDirectory, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The net's tensors at the start of the run, on every rank."""
    if ranks.rank() == 0:
        like = read_state(Path(run.path) / "start.safetensors").tensors
    return {name: ranks.from_first(like[name]) for name in sorted(like)}


def title(record: dict[str, Any]) -> str:
    """What an epoch's line begins with.

    >>> title({"epoch": 6, "count": 900, "decrease": 100, "lambda": 1e-5, "loss": 0.5})
    'epoch 6: 900 ReLUs (-100), λ 1e-05'
    """
    if "count" in record:
        what = f"{record['count']:,} ReLUs ({-record['decrease']:+,}), λ {record['lambda']:.4g}"
    else:
        what = f"lr {record['lr']:.3g}"
    return f"epoch {record['epoch']}: {what}"
