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
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import fastbcd
from arms import Arm, Problem, add_options, cifar10, fashion_mnist
from fastbcd.runs.directory import read_state
from table import machine

SHARES = (20_000 / 188_416, 8_000 / 188_416)
REFERENCE = 40_000 / 188_416  # where SNL hands over to BCD: B_ref
ARMS = ("uniform from SNL", "uniform", "saliency from SNL", "saliency", "SNL")
MARKS = "o^sDv"  # of the arms


def results(
    problem: Problem, o: argparse.Namespace, budgets: list[int]
) -> Iterator[dict]:
    """Seeds first: an interrupted experiment then has whole comparisons."""
    for seed in o.seeds:
        for budget in budgets:
            for name in ARMS:
                arm = Arm(problem, o, f"{name} {budget}", seed)
                yield arm.result(
                    lambda arm, name=name, budget=budget: work(arm, name, budget)
                )


def work(arm: Arm, name: str, budget: int) -> dict[str, Any]:
    """The way of an arm to its budget."""
    facts: dict[str, Any] = {"arm": name, "budget": budget, "reference": None}
    if name == "SNL":
        arm.snl(budget, arm.o.epochs - arm.o.final)
        return facts
    if "SNL" in name:
        reference = round(REFERENCE * fastbcd.masks(arm.net).total)
        arm.snl(reference, arm.o.snl_epochs, arm.settings(arm.o.snl_tune))
        facts["reference"] = fastbcd.accuracy(arm.net, arm.problem.test)
    share = budget / fastbcd.masks(arm.net).count()
    arm.descend(budget, share, proposal=name.split()[0])
    return facts


def curve(
    o: argparse.Namespace, name: str, budget: int, seed: int
) -> list[tuple[int, float]]:
    """(ReLUs left, train accuracy of the choice) of every step of an arm's BCD."""
    folder = o.out / f"{name.replace(' ', '-')}-{budget}-{seed}" / "bcd"
    if not (folder / "history.jsonl").exists():
        return []
    records = [
        json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()
    ]
    assert len(read_state(folder).history) == len(records)
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
            numbers = (
                mean(r[k] for r in mine) for k in ("accuracy", "epochs", "seconds")
            )
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


def plot(
    o: argparse.Namespace, results: list[dict[str, Any]], budgets: list[int]
) -> str:
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
        left.plot(
            budgets, [mean(p) for p in points], f"{MARKS[i]}-", color=f"C{i}", label=arm
        )
        for budget, values in zip(budgets, points, strict=True):
            left.plot([budget] * len(values), values, "_", color=f"C{i}")
        way = curve(o, arm, min(budgets), o.seeds[0])
        if way:
            right.plot(
                *zip(*way, strict=True), f"{MARKS[i]}-", color=f"C{i}", markersize=4
            )
    left.set(
        xlabel="ReLUs", ylabel="test accuracy, %", xscale="log", title="at the budget"
    )
    right.set(xlabel="ReLUs left", ylabel="train accuracy, %", xscale="log",
              title="after each removal, before its epoch")  # fmt: skip
    right.invert_xaxis()
    left.legend()
    figure.savefig(o.out / "proposals.png", dpi=120)
    return str(o.out / "proposals.png")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", choices=("cifar10", "fashion-mnist"), default="cifar10")
    add_options(parser, batch=128)
    add(
        "--snl-epochs",
        type=int,
        default=6,
        help="of SNL down to B_ref at most (%(default)s)",
    )
    add(
        "--snl-tune",
        type=int,
        default=2,
        help="epochs at B_ref before BCD (%(default)s)",
    )
    o = parser.parse_args()
    if o.quick:
        vars(o).update(
            data="fashion-mnist", images=128, samples=64, epochs=4, final=1, snl_epochs=1,
            snl_tune=1, seeds=[0], dense_epochs=2, rt=2,
        )  # fmt: skip
    if o.epochs - o.final - o.snl_epochs - o.snl_tune < 1:
        parser.error(
            "--epochs must leave a step of BCD beside --final, --snl-epochs, --snl-tune"
        )
    o.out = o.out or Path("runs") / f"proposals-{'quick' if o.quick else o.data}"
    return o


def main() -> None:
    o = options()
    if o.data == "cifar10":
        problem = cifar10(o.images)
    else:
        problem = fashion_mnist(
            o.images, width=o.width, epochs=o.dense_epochs, out=o.out
        )
    total = fastbcd.masks(problem.dense).total
    budgets = [round(share * total) for share in SHARES]
    print(machine())
    print(f"{total:,} ReLUs, {fastbcd.accuracy(problem.dense, problem.test):.2f} % on "
          f"{len(problem.test):,} test images; {vars(o)}", flush=True)  # fmt: skip
    every = []
    for arm in results(problem, o, budgets):
        text = f"{arm['arm']:<20} {arm['budget']:>7,} ReLUs, seed {arm['seed']}: "
        text += f"{arm['accuracy']:.2f} %, {arm['seconds']:.0f} s"
        print(text, flush=True)
        every.append(arm)
    print_table(every, budgets)
    print(f"\n{plot(o, every, budgets)}")


if __name__ == "__main__":
    main()
