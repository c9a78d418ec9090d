"""train: a dense net to begin with, by SNL's recipe; every epoch is saved and can be resumed from.

    trained = fastbcd.train(net, data, test=test, run_dir="runs/dense")

SGD with momentum on cross-entropy; lr of epoch e is lr/10^k, k the number of milestones (a half
and three quarters of all epochs) that e has reached.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.directory import RunDirectory, Unsaved, check_resume
from fastbcd.runtime import ranks
from fastbcd.runtime.malloc import kept_memory
from fastbcd.scoring.accuracy import accuracy, check_classes
from fastbcd.training.finetune import (
    Finetune,
    Finetuner,
    make_optimizer,
    repeatable,
    training_mode,
)

MILESTONES = (0.5, 0.75)
DECAY = 10
MOMENTUM = "momentum."  # before the names of the optimizer's tensors in a state


class Trained(NamedTuple):
    """The net that was given, trained, and a record of every epoch.

    >>> Trained(nn.Linear(4, 3), [{"loss": 1.5}]).history[-1]["loss"]
    1.5
    """

    model: nn.Module
    history: list[dict[str, Any]]


def train(
    net: nn.Module,
    data: Any,
    *,
    epochs: int = 160,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    batch_size: int = 256,
    padding: int = 4,
    flip: bool = True,
    amp: bool | None = None,
    test: Any = None,
    seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    progress: bool = False,
) -> Trained:
    """Train the net in place on random crops and flips, with SNL's values as defaults.

    The same weights, seed and data give the same weights again, also after an interruption.
    run_dir and resume are those of `bcd`; its last state can be given to `fastbcd bcd --weights`.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> [record["lr"] for record in train(net, data, epochs=4, padding=0).history]
    [0.1, 0.1, 0.01, 0.001]
    """
    settings = Finetune(
        epochs=epochs, lr=lr, momentum=momentum, weight_decay=weight_decay, batch_size=batch_size,
        padding=padding, flip=flip, amp=amp,
    )  # fmt: skip
    check_resume(resume)
    tuner = Finetuner(net, data, settings, seed=seed)
    images = None if test is None else as_data(test)
    if images is not None:
        check_classes(net, images, "the net, asked about the test set,")
    training = _Training(tuner, images, progress)
    with closing(_open(tuner, images, run_dir, resume)) as run:
        training.take_up(run)
        try:
            training.go_on(run)
        except BaseException:
            snapshots.restore(net, training.good)
            raise
    return Trained(net, run.history)


def rate(lr: float, epoch: int, epochs: int) -> float:
    """The learning rate of an epoch, counted from 0.

    >>> [round(rate(0.1, e, 160), 6) for e in (0, 79, 80, 119, 120, 159)]
    [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    """
    return lr / DECAY ** sum(epoch >= m * epochs for m in MILESTONES)


class _Training:
    """A net, its optimizer, and the state after the last finished epoch."""

    def __init__(self, tuner: Finetuner, test: ImageData | None, progress: bool) -> None:
        self.tuner, self.net, self.test = tuner, tuner.net, test
        self.quiet = not progress or ranks.rank() > 0
        self.good: dict[str, Tensor] = {}
        self.momenta: dict[str, Tensor] = {}

    def take_up(self, run: RunDirectory | Unsaved) -> None:
        """Begin, or be as after the last epoch that was finished."""
        if run.state is None:
            self.good = snapshots.take(self.net)
            run.save(0, self.good, {})
        else:
            momenta = {k: v for k, v in run.state.tensors.items() if k.startswith(MOMENTUM)}
            self.momenta = {k.removeprefix(MOMENTUM): v for k, v in momenta.items()}
            self.good = {k: v for k, v in run.state.tensors.items() if k not in momenta}
            snapshots.restore(self.net, self.good)
        ranks.check_same("the weights", self.good)

    def go_on(self, run: RunDirectory | Unsaved) -> None:
        """The epochs that are left."""
        tuner, s = self.tuner, self.tuner.settings
        with ExitStack() as stack:
            stack.enter_context(kept_memory())
            stack.enter_context(training_mode(self.net, tuner.memory_format))
            optimizer = make_optimizer(self.net, s)
            self._set_momenta(optimizer)
            model = tuner.distributed()
            for epoch in range(len(run.history), s.epochs):
                begin = time.perf_counter()
                for group in optimizer.param_groups:
                    group["lr"] = rate(s.lr, epoch, s.epochs)
                batches = math.ceil(len(tuner.data) / s.batch_size)
                bar = tqdm(total=batches, desc=f"epoch {epoch}", leave=False, disable=self.quiet)
                with bar, repeatable(tuner.data.device, tuner.seed, epoch):
                    loss = tuner.epoch(model, optimizer, 0, epoch, None, bar)
                tuner.share_buffers()
                record: dict[str, Any] = {
                    "number": epoch + 1, "lr": group["lr"], "loss": loss, "test_accuracy": None,
                }  # fmt: skip
                if self.test is not None:
                    record["test_accuracy"] = accuracy(self.net, self.test)
                    model.train()
                record["seconds"] = {"epoch": time.perf_counter() - begin}
                self._save(run, record, optimizer, last=epoch + 1 == s.epochs)

    def _save(
        self, run: RunDirectory | Unsaved, record: dict[str, Any], optimizer: Any, last: bool
    ) -> None:
        """Momenta are of no use after the last epoch: the net alone is left."""
        good = snapshots.take(self.net)
        momenta = {} if last else self._momenta(optimizer)
        ranks.check_same("the weights", good)
        run.save(record["number"], {**good, **momenta}, record)
        self.good = good
        if not self.quiet:
            tqdm.write(describe(record, self.tuner.settings.epochs))

    def _momenta(self, optimizer: Any) -> dict[str, Tensor]:
        found = {}
        for name, p in self.net.named_parameters():
            buffer = optimizer.state.get(p, {}).get("momentum_buffer")
            if buffer is not None:
                found[MOMENTUM + name] = buffer.detach().cpu().contiguous().clone()
        return found

    def _set_momenta(self, optimizer: Any) -> None:
        for name, p in self.net.named_parameters():
            if name in self.momenta:
                # In the parameter's own memory format.
                buffer = torch.empty_like(p).copy_(self.momenta[name]).detach()
                optimizer.state[p]["momentum_buffer"] = buffer


def describe(record: dict[str, Any], epochs: int) -> str:
    """An epoch in one line.

    >>> describe({"number": 3, "lr": 0.1, "loss": 1.5, "test_accuracy": 40.0, "seconds": {}}, 9)
    'epoch 3 of 9: lr 0.1, loss 1.5000, test 40.00 %, 0.0 s'
    """
    parts = [f"lr {record['lr']:.3g}", f"loss {record['loss']:.4f}"]
    if record["test_accuracy"] is not None:
        parts.append(f"test {record['test_accuracy']:.2f} %")
    parts.append(f"{sum(record['seconds'].values()):.1f} s")
    return f"epoch {record['number']} of {epochs}: {', '.join(parts)}"


def _open(
    tuner: Finetuner, test: ImageData | None, run_dir: Any, resume: str | bool
) -> RunDirectory | Unsaved:
    if run_dir is None:
        return Unsaved()
    names = ("epochs", "lr", "momentum", "weight_decay", "batch_size", "padding", "flip", "amp")
    settings = {n: v for n, v in dataclasses.asdict(tuner.settings).items() if n in names}
    config = {
        "format": "fastbcd.dense 1",
        "settings": {**settings, "seed": tuner.seed},
        "data": snapshots.data_mark(tuner.data),
        "test": None if test is None else snapshots.data_mark(test),
        "net": snapshots.structure(tuner.net),
    }
    return RunDirectory(run_dir, config, resume)
