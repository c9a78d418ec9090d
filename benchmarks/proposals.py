"""Compare five ways to the same number of ReLUs: SNL, and BCD with two proposals and two starts.

    FASTBCD_DATA=folder python benchmarks/proposals.py              # ResNet-20 on CIFAR-10
    python benchmarks/proposals.py --data fashion-mnist             # the embedded images
    python benchmarks/proposals.py --quick                          # a tiny version, one minute

The folder holds `cifar10-12k.npz` and `resnet20-cifar10.safetensors`. The arms, each to 10.6 % and
to 4.2 % of the ReLUs (20,000 and 8,000 of ResNet-20's 188,416), with every seed:

    uniform from SNL    the paper: SNL down to 40,000, then BCD with uniform hypotheses
    uniform             BCD from the dense net, uniform hypotheses
    saliency from SNL   as the first, with hypotheses that favour small saliency
    saliency            as the second, with these
    SNL                 SNL alone, down to the budget

Each arm has the same number of epochs on the same images: those of SNL's mask training and of the
fine-tune at 40,000 count, BCD has one epoch per step (each step removes a fraction of what is left,
and there are as many steps as epochs), and all end with a fine-tune of at least `--final` epochs.
All distill from the dense net. Every arm has run directories of its own below `--out`; the same
command resumes. The seeds may run at the same time (`--seeds 0`, `--seeds 1`); the same command
with both then reports.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn

import fastbcd
from fastbcd.runs.files import read_state
from fastbcd.runtime.atomic_files import write_atomically
from table import machine

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHARES = (20_000 / 188_416, 8_000 / 188_416)
REFERENCE = 40_000 / 188_416  # where SNL hands over to BCD: B_ref
ARMS = ("uniform from SNL", "uniform", "saliency from SNL", "saliency", "SNL")
MARKS = "o^sDv"  # of the arms


class Problem(NamedTuple):
    """What all arms begin with."""

    dense: nn.Module
    train: fastbcd.ImageData
    test: fastbcd.ImageData


# ------------------------------------------------------------------------------- beginnings


def cifar10(o: argparse.Namespace) -> Problem:
    folder = Path(os.environ["FASTBCD_DATA"])
    net = fastbcd.models.resnet20(num_classes=10, image_size=32)
    net.load_state_dict(load_file(folder / "resnet20-cifar10.safetensors"), strict=False)
    train, test = (fastbcd.ImageData.from_npz(folder / "cifar10-12k.npz", s, mean=MEAN, std=STD)
                   for s in ("train", "test"))  # fmt: skip
    return Problem(net.eval(), train.first(o.images), test)


def fashion_mnist(o: argparse.Namespace) -> Problem:
    """A small ResNet, trained here first."""
    torch.manual_seed(0)
    train, test = (fastbcd.load("fashion-mnist-mini", split) for split in ("train", "test"))
    train, test = train.first(min(o.images, len(train))), test.first(min(o.images, len(test)))
    net = fastbcd.models.resnet20(image_size=28, in_channels=1, width=o.width, blocks=1)
    fastbcd.train(net, train, epochs=o.dense_epochs, batch_size=64, run_dir=o.out / "dense")
    return Problem(net.eval(), train, test)


# ------------------------------------------------------------------------------------- arms


class Arm:
    """One arm: a name, a budget and a seed, and what it has used up so far."""

    def __init__(self, problem: Problem, o: argparse.Namespace, name: str, budget: int, seed: int):
        self.problem, self.o, self.name, self.budget, self.seed = problem, o, name, budget, seed
        self.net = copy.deepcopy(problem.dense)
        self.folder = o.out / f"{name.replace(' ', '-')}-{budget}-{seed}"
        self.epochs, self.seconds = 0, 0.0
        self.reference: float | None = None  # test accuracy where SNL handed over

    def result(self) -> dict[str, Any]:
        """What the arm came to; kept in a file, so that a finished arm is not run again."""
        path = self.folder / "result.json"
        if path.exists():
            return json.loads(path.read_text())
        budget = self.budget
        if self.name == "SNL":
            self.start(budget, self.o.epochs - self.o.final, None)
        elif "SNL" in self.name:
            reference = round(REFERENCE * fastbcd.masks(self.net).total)
            self.start(reference, self.o.snl_epochs, self.settings(self.o.snl_tune))
            self.reference = fastbcd.accuracy(self.net, self.problem.test)
        if self.name != "SNL":
            self.descend()
        self.tune(self.o.epochs - self.epochs)
        found = {
            "arm": self.name, "budget": budget, "seed": self.seed, "epochs": self.epochs,
            "relus": fastbcd.masks(self.net).count(), "seconds": self.seconds,
            "accuracy": fastbcd.accuracy(self.net, self.problem.test), "reference": self.reference,
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(json.dumps(found).encode()))
        return found

    def start(self, relus: int, epochs: int, tune: fastbcd.Finetune | None) -> None:
        """SNL's mask training; arms that start alike share it, and each counts its time."""
        o, folder = self.o, self.o.out / f"start-{relus}-{self.seed}"
        found = fastbcd.snl(
            self.net, self.problem.train, relus, teacher=self.problem.dense, lr=o.snl_lr,
            lambda0=o.snl_lambda, kappa=o.snl_kappa, max_epochs=epochs,
            batch_size=o.snl_batch, finetune=tune, seed=self.seed, run_dir=folder,
            progress=o.progress,
        )  # fmt: skip
        records = found.history + found.finetune
        self.epochs += len(records)
        self.seconds += sum(sum(record["seconds"].values()) for record in records)
        count = found.history[-1]["count"]
        print(f"  SNL: {len(found.history)} epochs, {count:,} above the threshold", flush=True)

    def descend(self) -> None:
        """BCD with one epoch per step; each step removes a fraction of the ReLUs left."""
        o, count = self.o, fastbcd.masks(self.net).count()
        steps = o.epochs - o.final - self.epochs
        share = 1 - (self.budget / count) ** (1 / steps)
        # A little more, so that rounding does not ask for a step beyond the epochs.
        drc = fastbcd.Fraction(min(1.0, share * 1.002), least=1)
        run = fastbcd.bcd(
            self.net, self.problem.train, self.budget, drc=drc, rt=o.rt, adt=o.adt,
            finetune=self.settings(1), proposal=self.name.split()[0], teacher=self.problem.dense,
            samples=min(o.samples, len(self.problem.train)), seed=self.seed,
            run_dir=self.folder / "bcd", progress=o.progress,
        )  # fmt: skip
        self.epochs += len(run.history)
        self.seconds += sum(sum(step.seconds.values()) for step in run.history)

    def tune(self, epochs: int) -> None:
        begun = time.perf_counter()
        tuner = fastbcd.Finetuner(
            self.net, self.problem.train, self.settings(epochs), self.problem.dense, seed=self.seed
        )
        tuner.run(step=10**6, progress=self.o.progress)  # views that no step has used
        self.epochs += epochs
        self.seconds += time.perf_counter() - begun

    def settings(self, epochs: int) -> fastbcd.Finetune:
        return fastbcd.Finetune(epochs=epochs, lr=self.o.lr, batch_size=self.o.batch)


def curve(o: argparse.Namespace, name: str, budget: int, seed: int) -> list[tuple[int, float]]:
    """(ReLUs left, train accuracy of the choice) of every step of an arm's BCD."""
    folder = o.out / f"{name.replace(' ', '-')}-{budget}-{seed}" / "bcd"
    if not (folder / "history.jsonl").exists():
        return []
    records = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert read_state(folder / "state.safetensors").step == len(records)
    return [(r["after"], r["chosen_accuracy"]) for r in records]


# ------------------------------------------------------------------------------------ report


def print_table(results: list[dict[str, Any]], budgets: list[int]) -> None:
    """Accuracy, epochs and seconds of every arm, means over seeds, and each seed's accuracy."""
    print(f"\n{'arm':<20}" + "".join(f"{f'{b:,} ReLUs':>30}" for b in budgets))
    print(f"{'':<20}" + f"{'test %':>10}{'epochs':>8}{'seconds':>12}" * len(budgets))
    for arm in ARMS:
        cells = ""
        for budget in budgets:
            mine = [r for r in results if (r["arm"], r["budget"]) == (arm, budget)]
            numbers = (mean(r[k] for r in mine) for k in ("accuracy", "epochs", "seconds"))
            cells += "{:>10.2f}{:>8.0f}{:>12.0f}".format(*numbers)
        print(f"{arm:<20}{cells}")
    print("\neach seed, test %")
    for arm in ARMS:
        by_seed = [
            " / ".join(f"{r['accuracy']:.2f}" for r in results
                       if (r["arm"], r["budget"]) == (arm, budget))
            for budget in budgets
        ]  # fmt: skip
        print(f"{arm:<20}" + "".join(f"{cell:>30}" for cell in by_seed))


def plot(o: argparse.Namespace, results: list[dict[str, Any]], budgets: list[int]) -> str:
    """Left: the results. Right: what the train accuracy does on the way to the smallest budget."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: {error}"
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, arm in enumerate(ARMS):
        points = [[r["accuracy"] for r in results if (r["arm"], r["budget"]) == (arm, b)]
                  for b in budgets]  # fmt: skip
        left.plot(budgets, [mean(p) for p in points], f"{MARKS[i]}-", color=f"C{i}", label=arm)
        for budget, values in zip(budgets, points, strict=True):
            left.plot([budget] * len(values), values, "_", color=f"C{i}")
        way = curve(o, arm, min(budgets), o.seeds[0])
        if way:
            right.plot(*zip(*way, strict=True), f"{MARKS[i]}-", color=f"C{i}", markersize=4)
    left.set(xlabel="ReLUs", ylabel="test accuracy, %", xscale="log", title="at the budget")
    right.set(xlabel="ReLUs left", ylabel="train accuracy, %", xscale="log",
              title="after each removal, before its epoch")  # fmt: skip
    right.invert_xaxis()
    left.legend()
    figure.savefig(o.out / "proposals.png", dpi=120)
    return str(o.out / "proposals.png")


def arms(problem: Problem, o: argparse.Namespace, budgets: list[int]) -> Iterator[Arm]:
    """Seeds first: an interrupted experiment then has whole comparisons."""
    for seed in o.seeds:
        for budget in budgets:
            for name in ARMS:
                yield Arm(problem, o, name, budget, seed)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", choices=("cifar10", "fashion-mnist"), default="cifar10")
    add("--quick", action="store_true", help="a smoke test: tiny, on the embedded images")
    add("--out", type=Path, help="run directories (runs/proposals-DATA)")
    add("--images", type=int, default=2_000, help="to train on (%(default)s)")
    add("--samples", type=int, default=1_000, help="to score on (%(default)s)")
    add("--epochs", type=int, default=15, help="of an arm in all (%(default)s)")
    add("--final", type=int, default=3, help="of them after the last removal (%(default)s)")
    add("--lr", type=float, default=0.01, help="of the fine-tuning (%(default)s)")
    add("--batch", type=int, default=128, help="(%(default)s)")
    add("--rt", type=int, default=4, help="hypotheses at most a step (%(default)s)")
    add("--adt", type=float, default=0.3, help="percentage points (%(default)s)")
    add(
        "--snl-epochs",
        type=int,
        default=6,
        help="of SNL's masks down to B_ref at most (%(default)s)",
    )
    add("--snl-tune", type=int, default=2, help="epochs at B_ref before BCD (%(default)s)")
    add("--snl-lr", type=float, default=4e-3, help="(%(default)s)")
    add("--snl-lambda", type=float, default=6e-3, help="(%(default)s)")
    add("--snl-kappa", type=float, default=1.5, help="(%(default)s)")
    add("--snl-batch", type=int, default=25, help="(%(default)s)")
    add("--seeds", type=int, nargs="+", default=[0, 1], help="(%(default)s)")
    add("--width", type=int, default=8, help="of the net for Fashion-MNIST (%(default)s)")
    add("--dense-epochs", type=int, default=20, help="of that net (%(default)s)")
    add("--progress", action="store_true", help="bars, and one line per step")
    o = parser.parse_args()
    if o.quick:
        vars(o).update(
            data="fashion-mnist", images=128, samples=64, epochs=4, final=1, snl_epochs=1,
            snl_tune=1, seeds=[0], dense_epochs=2, rt=2,
        )  # fmt: skip
    if o.epochs - o.final - o.snl_epochs - o.snl_tune < 1:
        parser.error("--epochs must leave a step of BCD beside --final, --snl-epochs, --snl-tune")
    o.out = o.out or Path("runs") / f"proposals-{'quick' if o.quick else o.data}"
    return o


def main() -> None:
    o = options()
    problem = cifar10(o) if o.data == "cifar10" else fashion_mnist(o)
    total = fastbcd.masks(problem.dense).total
    budgets = [round(share * total) for share in SHARES]
    print(machine())
    print(f"{total:,} ReLUs, {fastbcd.accuracy(problem.dense, problem.test):.2f} % on "
          f"{len(problem.test):,} test images; {vars(o)}", flush=True)  # fmt: skip
    results = []
    for arm in arms(problem, o, budgets):
        found = arm.result()
        print(f"{found['arm']:<20} {found['budget']:>7,} ReLUs, seed {found['seed']}: "
              f"{found['accuracy']:.2f} %, {found['seconds']:.0f} s", flush=True)  # fmt: skip
        results.append(found)
    print_table(results, budgets)
    print(f"\n{plot(o, results, budgets)}")


if __name__ == "__main__":
    main()
