"""train: train a dense net with SNL's recipe; every epoch is saved and can be resumed from.

SGD with momentum on cross-entropy. The learning rate is divided by 10 after a half and again
after three quarters of the epochs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from fastbcd.data.for_net import data_for
from fastbcd.runs.config import Config
from fastbcd.runs.journal import journal
from fastbcd.runs.step import Epoch, Start
from fastbcd.runtime.settings import Settings, fields_in, setting, with_settings
from fastbcd.scoring.accuracy import check_classes
from fastbcd.training.epochs import train_epochs
from fastbcd.training.loop import Trainer
from fastbcd.training.settings import Finetune

MILESTONES = (0.5, 0.75)
DECAY = 10


@dataclass(frozen=True, kw_only=True)
class DenseTraining(Settings):
    """How a dense net is trained; the defaults are SNL's."""

    epochs: int = setting(160, "of training", least=0)
    lr: float = setting(0.1, "learning rate of the first half of the epochs", least=0)
    momentum: float = setting(0.9, "of SGD", least=0)
    weight_decay: float = setting(5e-4, "of SGD", least=0)
    batch_size: int = setting(256, "images of a batch, over all ranks", least=1)
    padding: int = setting(4, "of the random crop", least=0)
    flip: bool = setting(True, "whether images are flipped at random")
    amp: bool | None = setting(None, "bfloat16 autocast; None: on CUDA only")
    seed: int = setting(0, "of all random numbers", least=0, most=2**63 - 1)


class Trained(NamedTuple):
    """The net that was given, trained, and one record per epoch.

    >>> epoch = fastbcd.Epoch(number=1, loss=1.5)
    >>> Trained(nn.Linear(4, 3), [epoch]).history[-1].loss
    1.5
    """

    model: nn.Module
    history: list[Epoch]


@with_settings(DenseTraining)
def train(
    net: nn.Module,
    data: Any,
    *,
    test: Any = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    progress: bool = False,
    **settings: Any,
) -> Trained:
    """Train the net in place on random crops and flips, with SNL's values as defaults.

    The same weights, seed and data give the same weights again, also after an interruption.
    run_dir and resume are those of `bcd`; `fastbcd bcd --weights` reads the run directory.
    Frozen parameters and modules stay frozen, see `Finetuner`. After an exception the net has the
    weights of the last finished epoch.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))
    >>> data = torch.randn(50, 1, 2, 2), torch.arange(50) % 3
    >>> [record.lr for record in train(net, data, epochs=4, padding=0).history]
    [0.1, 0.1, 0.01, 0.001]
    """
    chosen = DenseTraining(**settings)
    sgd = Finetune(**fields_in(Finetune, vars(chosen)))
    trainer = Trainer(net, data_for(net, data), sgd, seed=chosen.seed)
    if test is not None:
        test = data_for(net, test)
        check_classes(net, test, "the net, asked about the test set,")
    config = Config.of("train", chosen.describe(), net, data=trainer.data, test=test)
    opened = journal(
        config,
        net,
        Epoch,
        begin=Start,
        over=lambda history: len(history) >= chosen.epochs,
        run_dir=run_dir,
        resume=resume,
    )
    rates = []
    for epoch in range(chosen.epochs):
        decays = sum(epoch >= milestone * chosen.epochs for milestone in MILESTONES)
        rates.append(chosen.lr / DECAY**decays)
    with opened as run:
        train_epochs(trainer, run, "train", rates, step=0, test=test, progress=progress)
    return Trained(net, run.history)
