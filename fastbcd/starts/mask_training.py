"""What SNL and AutoReP have in common: train masks epoch by epoch, decide, fine-tune, save.

A `Method` says how an epoch trains and which ReLUs stay; `carry_out` does the rest. With a run
directory every epoch is saved, Adam's moments among it, and the same call goes on from there:
the result is the same as without the interruption.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from fastbcd.masking.masks import MaskSet, masks, set_masks
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.directory import (
    RunDirectory,
    Unsaved,
    check_resume,
    read_state,
)
from fastbcd.runtime import ranks
from fastbcd.runtime.module_mode import keep_mode
from fastbcd.scoring.accuracy import accuracy, check_classes
from fastbcd.starts.overlaps import Overlaps
from fastbcd.training.finetune import Finetune, Finetuner
from fastbcd.training.trainer import Training

DECIDED, TUNED, FINAL = "decided", "finetune", "final"  # phases; an epoch of masks has none


@dataclass
class StartingPoint:
    """A net at its budget, and how it got there.

    history: one record an epoch, with what the paper plots: count, decrease, lambda, iou, ….
    accuracy: percent on `measured_on` of the net whose masks were "trained", right after they
    were cut to bits ("thresholded"), and after the fine-tune ("final").
    overlaps: [count, count, IoU] of random pairs of the epochs' masks.
    finetune: one record an epoch of the fine-tune.

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
    """How masks are trained; its `model` is a twin of the net."""

    model: nn.Module

    def begin(self, history: list[dict[str, Any]]) -> None:
        """Be as after these epochs; the model's own tensors are restored already."""

    def done(self, history: list[dict[str, Any]]) -> bool:
        """Is the mask training over?"""

    def epoch(self, training: Training, epoch: int, bar: Any) -> dict[str, Any]:
        """Train for an epoch; what there is to record, "count" among it."""

    def bits(self) -> Tensor:
        """The mask as it stands, [total]."""

    def decide(self, history: list[dict[str, Any]]) -> MaskSet:
        """Which ReLUs stay."""


@dataclass
class Job:
    """What a start works on, apart from its method."""

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

    def __post_init__(self) -> None:
        check_resume(self.resume)
        self.data = as_data(self.data)
        self.test = None if self.test is None else as_data(self.test)
        if self.test is not None:
            check_classes(self.net, self.test, "the net, asked about the test set,")
        self.progress = self.progress and ranks.rank() == 0

    @property
    def tuning(self) -> Finetune:
        return Finetune(epochs=0) if self.finetune is None else self.finetune

    @property
    def measured(self) -> ImageData:
        """What accuracies are measured on."""
        return self.data if self.test is None else self.test

    def save(
        self,
        run: RunDirectory | Unsaved,
        record: dict[str, Any],
        tensors: Callable[[], dict[str, Tensor]],
    ) -> None:
        """Finish an epoch; tensors are only made where they are written or compared."""
        state = tensors() if self.run_dir is not None or ranks.world() > 1 else {}
        ranks.check_same("the weights and masks", state)
        run.save(record["number"], state, record)

    def open(self) -> RunDirectory | Unsaved:
        if self.run_dir is None:
            return Unsaved()
        tuning = {k: v for k, v in dataclasses.asdict(self.tuning).items() if k != "teacher_cache"}
        common = {"batch_size": self.batch_size, "seed": self.seed, "finetune": tuning}
        config = {
            "format": f"fastbcd.{self.name} 1",
            "settings": {**self.settings, **common},
            "data": snapshots.data_mark(self.data),
            "test": None if self.test is None else snapshots.data_mark(self.test),
            "net": snapshots.structure(self.net),
            "teacher": None if self.teacher is None else snapshots.weights_mark(self.teacher),
        }
        return RunDirectory(self.run_dir, config, self.resume)


def carry_out(job: Job, make: Callable[[nn.Module], Method]) -> StartingPoint:
    """Train the masks, cut them to bits, fine-tune. After an exception the net is as it was.

    make: the method for the net, which is then as it was when the run began.
    """
    given = snapshots.take(job.net)
    # Made first, as they check everything: the data, the classes, the teacher, the settings.
    tuner = Finetuner(job.net, job.data, job.tuning, job.teacher, seed=job.seed)
    make(job.net)
    ranks.check_same("the weights and masks", given)
    ranks.check_same("the labels", {"labels": job.data.labels})
    with keep_mode(job.net), closing(job.open()) as run:
        try:
            if run.history and run.history[-1].get("phase") == FINAL:
                assert run.state is not None
                snapshots.restore(job.net, run.state.tensors)
                return _finished(job, run.history)
            if run.state is None:
                run.save(0, given, {})
            elif isinstance(run, RunDirectory):
                snapshots.restore(job.net, _start_of(run, given))
            if job.teacher is None:
                teacher = copy.deepcopy(job.net).eval()
                tuner = Finetuner(job.net, job.data, job.tuning, teacher, seed=job.seed)
            if not _phase(run.history, DECIDED):
                _train_masks(job, make(job.net), run, tuner)
            _fine_tune(job, run, tuner)
            return _finished(job, run.history)
        except BaseException:
            snapshots.restore(job.net, given)
            raise


def _train_masks(job: Job, method: Method, run: RunDirectory | Unsaved, tuner: Finetuner) -> None:
    """The mask training to its end, and the decision; the net then has its final masks."""
    training = Training(
        method.model, job.data, tuner.teacher, job.tuning, torch.optim.Adam,
        batch_size=job.batch_size, seed=job.seed, step=0,
    )  # fmt: skip
    seen = Overlaps(masks(job.net).sites)
    with closing(training):
        _mask_epochs(job, method, run, training, seen)
        found = {"trained": accuracy(method.model, job.measured)}
    chosen = method.decide(run.history)
    set_masks(job.net, chosen)
    found["thresholded"] = accuracy(job.net, job.measured)
    decided = {"number": len(run.history) + 1, "phase": DECIDED, "count": chosen.count()}
    decided |= {"accuracy": found, "overlaps": seen.pairs(job.seed)}
    job.save(run, decided, lambda: {f"net.{k}": t for k, t in snapshots.take(job.net).items()})


def _mask_epochs(
    job: Job, method: Method, run: RunDirectory | Unsaved, training: Training, seen: Overlaps
) -> None:
    history = run.history
    if run.state is not None and run.state.step:
        training.load(run.state.tensors)
        seen.load(run.state.tensors, run.state.step)
    method.begin(history)
    while not method.done(history):
        begin, number = time.perf_counter(), len(history)
        with tqdm(total=training.batches, disable=not job.progress, desc=job.name) as bar:
            record: dict[str, Any] = {"number": number + 1, "epoch": number}
            record |= method.epoch(training, number, bar)
            before = history[-1]["count"] if history else masks(job.net).count()
            record["decrease"] = before - record["count"]
            record["iou"] = seen.add(number, method.bits())
            _measure(job, method.model, record, begin, bar)
        job.save(run, record, lambda: {**training.state(), **seen.state()})


def _fine_tune(job: Job, run: RunDirectory | Unsaved, tuner: Finetuner) -> None:
    """What `Finetuner.run` does, an epoch at a time."""
    s, history = job.tuning, run.history
    decay: dict[str, Any] = {"weight_decay": s.weight_decay}
    kind = torch.optim.Adam if s.optimizer == "adam" else torch.optim.SGD
    decay |= {} if s.optimizer == "adam" else {"momentum": s.momentum}
    training = Training(
        job.net, job.data, tuner.teacher, s,
        lambda parameters: kind(parameters, s.lr, **decay),
        batch_size=s.batch_size, seed=job.seed, step=1,
    )  # fmt: skip
    with closing(training):
        if run.state is not None and run.state.record.get("phase") in (DECIDED, TUNED):
            training.load(run.state.tensors)
        for epoch in range(len(_phase(history, TUNED)), s.epochs):
            begin = time.perf_counter()
            with tqdm(total=training.batches, disable=not job.progress, desc="fine-tune") as bar:
                lr = s.lr * (1 + math.cos(math.pi * epoch / s.epochs)) / 2
                record = {"number": len(history) + 1, "phase": TUNED, "epoch": epoch, "lr": lr}
                record["loss"] = training.epoch(epoch, lr, bar=bar)
                _measure(job, job.net, record, begin, bar)
            job.save(run, record, training.state)
    (decided,) = _phase(history, DECIDED)
    final = {**decided, "number": len(history) + 1, "phase": FINAL}
    final["accuracy"] = {**decided["accuracy"], "final": accuracy(job.net, job.measured)}
    job.save(run, final, lambda: snapshots.take(job.net))


def _measure(job: Job, net: nn.Module, record: dict[str, Any], begin: float, bar: Any) -> None:
    """The end of an epoch's record, and its line."""
    if job.test is not None:
        record["test_accuracy"] = accuracy(net, job.test)
    record["seconds"] = {"epoch": time.perf_counter() - begin}
    if job.progress:
        bar.write(describe(record))


def _phase(history: list[dict[str, Any]], phase: str | None) -> list[dict[str, Any]]:
    return [record for record in history if record.get("phase") == phase]


def _finished(job: Job, history: list[dict[str, Any]]) -> StartingPoint:
    final, on = history[-1], "train" if job.test is None else "test"
    return StartingPoint(
        job.net, masks(job.net), _phase(history, None), final["accuracy"], on, final["overlaps"],
        _phase(history, TUNED),
    )  # fmt: skip


def _start_of(run: RunDirectory, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The net as the run began with it, on every rank."""
    if ranks.rank() == 0:
        like = read_state(Path(run.path) / "start.safetensors").tensors
    return {name: ranks.from_first(like[name]) for name in sorted(like)}


def describe(record: dict[str, Any]) -> str:
    """An epoch in one line.

    >>> describe({"epoch": 6, "count": 900, "decrease": 100, "lambda": 1e-5, "loss": 0.5})
    'epoch 6: 900 ReLUs (-100), λ 1e-05, loss 0.5000'
    """
    if "count" in record:
        what = f"{record['count']:,} ReLUs ({-record['decrease']:+,}), λ {record['lambda']:.4g}"
    else:
        what = f"lr {record['lr']:.3g}"
    parts = [f"epoch {record['epoch']}: {what}", f"loss {record['loss']:.4f}"]
    if record.get("iou") is not None:
        parts.append(f"IoU {record['iou']:.3f}")
    if "test_accuracy" in record:
        parts.append(f"test {record['test_accuracy']:.2f} %")
    if "seconds" in record:
        parts.append(f"{record['seconds']['epoch']:.1f} s")
    return ", ".join(parts)


def check_module(net: Any) -> None:
    """Refuse what is no network, before anything is asked of it."""
    if not isinstance(net, torch.nn.Module):
        raise TypeError(f"net is a {type(net).__name__}; expected a torch.nn.Module")
