"""train: train a dense net with SNL's recipe; every epoch is saved and can be resumed from.

SGD with momentum on cross-entropy. The learning rate is divided by 10 after a half and again
after three quarters of the epochs.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import Any, NamedTuple

from torch import Tensor, nn
from tqdm import tqdm

from fastbcd.data.for_net import data_for
from fastbcd.data.images import ImageData
from fastbcd.runs import fingerprint as snapshots
from fastbcd.runs.directory import check_resume, open_run
from fastbcd.runtime import ranks
from fastbcd.runtime.validate import check_whole
from fastbcd.scoring.accuracy import accuracy, check_classes
from fastbcd.training.loop import Session, Trainer, with_prefix, without_prefix
from fastbcd.training.repeat import repeatable
from fastbcd.training.settings import Finetune

MILESTONES = (0.5, 0.75)
DECAY = 10
MOMENTUM = "momentum."  # prefix of the optimizer's tensors in a state
BUFFER = "momentum_buffer."  # what torch calls them


class Trained(NamedTuple):
    """The net that was given, trained, and one record per epoch.

    >>> Trained(nn.Linear(4, 3), [{"loss": 1.5}]).history[-1]["loss"]
    1.5
    """

    model: nn.Module
    history: list[dict[str, Any]]


def train(
    net: nn.Module, data: Any, *, epochs: int = 160, lr: float = 0.1, momentum: float = 0.9,
    weight_decay: float = 5e-4, batch_size: int = 256, padding: int = 4, flip: bool = True,
    amp: bool | None = None, test: Any = None, seed: int = 0,
    run_dir: str | os.PathLike[str] | None = None, resume: str | bool = "auto",
    progress: bool = False,
) -> Trained:  # fmt: skip
    """Train the net in place on random crops and flips, with SNL's values as defaults.

    The same weights, seed and data give the same weights again, also after an interruption.
    run_dir and resume are those of `bcd`; `fastbcd bcd --weights` reads the run directory.
    Frozen parameters and modules stay frozen, see `Finetuner`. After an exception the net has the
    weights of the last finished epoch.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> [record["lr"] for record in train(net, data, epochs=4, padding=0).history]
    [0.1, 0.1, 0.01, 0.001]
    """
    names = ("epochs", "lr", "momentum", "weight_decay", "batch_size", "padding", "flip", "amp")
    given = locals()
    chosen = {name: given[name] for name in names}
    check_whole("epochs", epochs, 0)
    check_resume(resume)
    trainer = Trainer(net, data, Finetune(**chosen), seed=seed)
    if test is not None:
        test = data_for(net, test)
        check_classes(net, test, "the net, asked about the test set,")
    run = open_run(
        "dense", {"seed": seed, **chosen}, net, data=trainer.data, test=test, run_dir=run_dir,
        resume=resume,
    )  # fmt: skip
    with closing(run):
        state = {} if run.state is None else run.state.tensors
        good = {k: t for k, t in state.items() if not k.startswith(MOMENTUM)} or snapshots.take(net)
        ranks.check_same("the weights", good)
        if run.state is None:
            run.save(0, good, {})
        record: dict[str, Any] = {}

        def save(momenta: dict[str, Tensor]) -> dict[str, Tensor]:
            tensors = snapshots.take(net)
            ranks.check_same("the weights", tensors)
            run.save(record["number"], {**tensors, **with_prefix(momenta, MOMENTUM)}, record)
            return tensors

        try:
            with trainer.session() as session:
                snapshots.restore(net, good)
                session.load_optimizer(with_prefix(without_prefix(state, MOMENTUM), BUFFER))
                for epoch in range(len(run.history), epochs):
                    record = _epoch(session, epoch, test, quiet=not progress or ranks.rank() > 0)
                    if epoch + 1 < epochs:
                        good = save(without_prefix(session.optimizer_state(), BUFFER))
            if record:  # of the last epoch, after which the optimizer's state is of no use
                good = save({})
        except BaseException:
            snapshots.restore(net, good)
            raise
    return Trained(net, run.history)


def _epoch(session: Session, epoch: int, test: ImageData | None, quiet: bool) -> dict[str, Any]:
    """Train for one epoch and return its record."""
    trainer = session.trainer
    begin, s = time.perf_counter(), trainer.settings
    lr = s.lr / DECAY ** sum(epoch >= m * s.epochs for m in MILESTONES)
    bar = tqdm(total=len(trainer.sizes), desc=f"epoch {epoch}", leave=False, disable=quiet)
    with bar, repeatable(trainer.data.device, trainer.seed, epoch):
        loss = session.epoch(epoch, lr, bar=bar)
    record: dict[str, Any] = {"number": epoch + 1, "lr": lr, "loss": loss}
    record["test_accuracy"] = None if test is None else accuracy(trainer.model, test)
    record["seconds"] = {"epoch": time.perf_counter() - begin}
    if not quiet:
        tqdm.write(epoch_line(f"epoch {epoch + 1} of {s.epochs}: lr {lr:.3g}", record))
    return record


def epoch_line(title: str, record: dict[str, Any]) -> str:
    """An epoch's record in one line: title, loss 1.5000, test 40.00 %, 3.2 s."""
    parts = [title, f"loss {record['loss']:.4f}"]
    if record.get("iou") is not None:
        parts.append(f"IoU {record['iou']:.3f}")
    if record.get("test_accuracy") is not None:
        parts.append(f"test {record['test_accuracy']:.2f} %")
    parts.append(f"{record['seconds']['epoch']:.1f} s")
    return ", ".join(parts)
