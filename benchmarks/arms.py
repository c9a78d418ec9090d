"""Shared by experiments that compare ways from one dense net to few ReLUs, at equal epochs.

A way is an arm: it trains masks by SNL, descends by BCD with one epoch per step, or both, and ends
with a fine-tune; or it is `fastbcd.linearize`. Its runs have directories of their own and its
result is kept in a file, so that the same command resumes an experiment, also after some of its
seeds ran elsewhere. `reduced` is what experiments that need a net with few ReLUs begin with.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save, save_file
from torch import nn

import fastbcd
from fastbcd.cli.demo import trained_resnet
from fastbcd.data.npz import load_npz
from fastbcd.runs.fingerprint import restore, take
from fastbcd.runtime.atomic_files import write_atomically

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Problem(NamedTuple):
    """What all arms begin with."""

    dense: nn.Module
    train: fastbcd.ImageData
    test: fastbcd.ImageData
    held_out: fastbcd.ImageData | None = None  # train images that no arm trains on


def cifar10(images: int) -> Problem:
    """ResNet-20 and CIFAR-10 from $FASTBCD_DATA."""
    folder = Path(os.environ["FASTBCD_DATA"])
    net = fastbcd.models.resnet20(num_classes=10, image_size=32)
    net.load_state_dict(
        load_file(folder / "resnet20-cifar10.safetensors"), strict=False
    )
    train, test = (load_npz(folder / "cifar10-12k.npz", s, mean=MEAN, std=STD)
                   for s in ("train", "test"))  # fmt: skip
    held_out = train.rest(images) if images < len(train) else None
    return Problem(net.eval(), train.first(images), test, held_out)


def fashion_mnist(images: int, *, width: int, epochs: int, out: Path) -> Problem:
    """A small ResNet on the embedded images, trained here first."""
    torch.manual_seed(0)
    train, test = (
        fastbcd.load("fashion-mnist-mini", split) for split in ("train", "test")
    )
    train, test = (
        train.first(min(images, len(train))),
        test.first(min(images, len(test))),
    )
    net = fastbcd.models.resnet20(image_size=28, in_channels=1, width=width, blocks=1)
    fastbcd.train(net, train, epochs=epochs, batch_size=64, run_dir=out / "dense")
    return Problem(net.eval(), train, test)


def small(images: int) -> Problem:
    """The demo's trained ResNet-8 and the embedded images."""
    train, test = (
        fastbcd.load("fashion-mnist-mini", split) for split in ("train", "test")
    )
    return Problem(trained_resnet(), train.first(images), test, train.rest(images))


NETS = {
    "resnet20": cifar10,
    "small": small,
}  # by a number of train images, fewer than all


def problem_of(o: argparse.Namespace, net: str = "resnet20") -> Problem:
    """What an experiment with the options of `add_options` begins with."""
    if o.quick:
        return fashion_mnist(o.images, width=o.width, epochs=o.dense_epochs, out=o.out)
    return NETS[net](o.images)


def reduced(
    problem: Problem, count: int, *, keep: float, tuning: fastbcd.Finetune, out: Path
) -> nn.Module:
    """The net at `count` ReLUs: the least salient go first, with a fine-tune after each step.

    A step leaves the share `keep`. The net of each step is kept in `out`, and is the same whichever
    counts are asked for.
    """
    net = copy.deepcopy(problem.dense)
    tuner: fastbcd.Finetuner | None = None  # its teacher takes time to prepare
    while (kept := fastbcd.masks(net).count()) > count:
        less = max(count, int(kept * keep))
        path = out / f"net-{less}.safetensors"
        if not path.exists():
            images = problem.train.first(min(2_000, len(problem.train)))
            draw = fastbcd.Saliency(0.0)(net, images, kept - less, seed=0, step=less)
            fastbcd.set_masks(net, fastbcd.masks(net).without(draw(0)))
            tuner = tuner or fastbcd.Finetuner(
                net, problem.train, tuning, problem.dense
            )
            tuner.run(less)
            tensors = take(net)
            write_atomically(path, save(tensors))
            print(f"trained {path.name}", flush=True)
        restore(net, load_file(path))
    return net.eval()


def add_options(parser: argparse.ArgumentParser, batch: int) -> None:
    """The options that `Arm` reads; batch: the default of --batch."""
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="a smoke test: tiny, on the embedded images",
    )
    add("--out", type=Path, help="run directories (runs/NAME)")
    add("--images", type=int, default=2_000, help="to train on (%(default)s)")
    add("--samples", type=int, default=1_000, help="to score on (%(default)s)")
    add("--epochs", type=int, default=15, help="of an arm in all (%(default)s)")
    add(
        "--final",
        type=int,
        default=3,
        help="of them after the last removal (%(default)s)",
    )
    add("--lr", type=float, default=0.01, help="of the fine-tuning (%(default)s)")
    add("--batch", type=int, default=batch, help="(%(default)s)")
    add("--rt", type=int, default=4, help="hypotheses at most a step (%(default)s)")
    add("--adt", type=float, default=0.3, help="percentage points (%(default)s)")
    add("--snl-lr", type=float, default=4e-3, help="(%(default)s)")
    add("--snl-lambda", type=float, default=6e-3, help="(%(default)s)")
    add("--snl-kappa", type=float, default=1.5, help="(%(default)s)")
    add("--snl-batch", type=int, default=25, help="(%(default)s)")
    add("--seeds", type=int, nargs="+", default=[0, 1], help="(%(default)s)")
    add(
        "--width",
        type=int,
        default=8,
        help="of the net for Fashion-MNIST (%(default)s)",
    )
    add("--dense-epochs", type=int, default=20, help="of that net (%(default)s)")
    add("--progress", action="store_true", help="bars, and one line per step")


class Arm:
    """One way with one seed, its net, and what it has used up so far; o: see `add_options`."""

    def __init__(
        self, problem: Problem, o: argparse.Namespace, name: str, seed: int
    ) -> None:
        self.problem = problem
        self.o = o
        self.name = name
        self.seed = seed
        self.net = copy.deepcopy(problem.dense)
        self.folder = o.out / f"{name.replace(' ', '-')}-{seed}"
        self.epochs = 0
        self.seconds = 0.0
        self.tuning: dict[str, Any] = {}  # further settings of its fine-tunes

    def result(self, work: Callable[[Arm], dict[str, Any]]) -> dict[str, Any]:
        """What the arm came to after `work`, a fine-tune with the epochs left, and a test.

        It is kept in result.json beside masks.safetensors and net.safetensors, the weights: a
        finished arm is not run again. work returns more facts to keep. Settings are to be chosen
        by the accuracy on images held out, not on the test images.
        """
        path = self.folder / "result.json"
        if path.exists():
            return json.loads(path.read_text())
        facts = work(self)
        self.tune(self.o.epochs - self.epochs)
        masks = fastbcd.masks(self.net)
        result = {
            "arm": self.name,
            "seed": self.seed,
            "epochs": self.epochs,
            "relus": masks.count(),
            "seconds": self.seconds,
            "accuracy": fastbcd.accuracy(self.net, self.problem.test),
            **facts,
        }
        if self.problem.held_out is not None:
            result["held_out"] = fastbcd.accuracy(self.net, self.problem.held_out)
        self.folder.mkdir(parents=True, exist_ok=True)
        masks.save(self.folder / "masks.safetensors")
        weights = {
            name: tensor.contiguous() for name, tensor in self.net.state_dict().items()
        }
        save_file(weights, self.folder / "net.safetensors")
        write_atomically(path, json.dumps(result).encode())
        return result

    def snl(
        self, relus: int, epochs: int, tune: fastbcd.Finetune | None = None
    ) -> None:
        """SNL's mask training; arms that start alike share it, and each counts its time."""
        o = self.o
        folder = o.out / f"start-{relus}-{self.seed}"
        start = fastbcd.snl(
            self.net, self.problem.train, relus, teacher=self.problem.dense, lr=o.snl_lr,
            lambda0=o.snl_lambda, kappa=o.snl_kappa, max_epochs=epochs,
            batch_size=o.snl_batch, finetune=tune, seed=self.seed, run_dir=folder,
            progress=o.progress,
        )  # fmt: skip
        records = start.history + start.finetune
        self.epochs += len(records)
        self.seconds += sum(sum(record.seconds.values()) for record in records)
        count = start.history[-1].count
        text = f"  SNL: {len(start.history)} epochs, {count:,} above the threshold"
        print(text, flush=True)

    def steps(self) -> int:
        """Steps of one epoch that leave --final epochs."""
        return self.o.epochs - self.o.final - self.epochs

    def descend(self, budget: Any, share: float, **settings: Any) -> None:
        """BCD to a budget with one epoch per step, each of which removes a share of what is left.

        share: what `steps()` steps leave of the start. settings: of `bcd`.
        """
        o = self.o
        # A little more, so that rounding does not ask for a step beyond the epochs.
        part = min(1.0, (1 - share ** (1 / self.steps())) * 1.002)
        run = fastbcd.bcd(
            self.net, self.problem.train, budget, drc=fastbcd.Fraction(part, least=1), rt=o.rt,
            adt=o.adt, finetune=self.settings(1), teacher=self.problem.dense,
            samples=min(o.samples, len(self.problem.train)), seed=self.seed,
            run_dir=self.folder / "bcd", progress=o.progress, **settings,
        )  # fmt: skip
        self.epochs += len(run.history)
        self.seconds += sum(sum(step.seconds.values()) for step in run.history)

    def linearize(self, budget: Any, **settings: Any) -> list[fastbcd.Step]:
        """`fastbcd.linearize` with all epochs; its history."""
        o, problem = self.o, self.problem
        run = fastbcd.linearize(
            problem.dense, problem.train, budget, epochs=o.epochs, batch_size=o.batch, rt=o.rt,
            adt=o.adt, samples=min(o.samples, len(problem.train)), seed=self.seed,
            run_dir=self.folder / "linearize", progress=o.progress, **settings,
        )  # fmt: skip
        self.net = run.model
        self.epochs += o.epochs
        self.seconds += sum(sum(step.seconds.values()) for step in run.history)
        return run.history

    def tune(self, epochs: int) -> None:
        if not epochs:
            return
        assert epochs >= 0, f"{self.name} has taken {-epochs} epochs more than --epochs"
        begun = time.perf_counter()
        tuner = fastbcd.Finetuner(
            self.net,
            self.problem.train,
            self.settings(epochs),
            self.problem.dense,
            seed=self.seed,
        )
        tuner.run(step=10**6, progress=self.o.progress)  # views that no step has used
        self.epochs += epochs
        self.seconds += time.perf_counter() - begun

    def settings(self, epochs: int) -> fastbcd.Finetune:
        return fastbcd.Finetune(
            epochs=epochs, lr=self.o.lr, batch_size=self.o.batch, **self.tuning
        )
