"""Several budgets by one way down, against a run of its own for each.

    FASTBCD_DATA=folder python benchmarks/curve.py         # ResNet-20 on CIFAR-10
    python benchmarks/curve.py --net small --images 3000   # the demo's net
    python benchmarks/curve.py --quick                     # a tiny version, a minute

"separate" is `fastbcd.linearize` from the dense net for each budget, in `--epochs` epochs each.
"one way" is `fastbcd.linearize` with the list of budgets, in `--share` of those epochs in all.
Accuracies are measured on train images that neither trains on. Runs are saved below `--out`; the
same command resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import fastbcd
from arms import NETS, Problem, add_options, problem_of
from table import machine

BUDGETS = {
    "resnet20": [100_000, 50_000, 20_000, 8_000],
    "small": [12_000, 6_000, 3_000, 1_200],
}
ROWS = ("separate", "one way")


def runs(
    problem: Problem, o: argparse.Namespace, row: str, seed: int
) -> list[fastbcd.Run]:
    """The run of each budget."""
    settings: dict[str, Any] = {
        "replacement": o.replacement,
        "batch_size": o.batch,
        "rt": o.rt,
        "samples": o.samples,
        "seed": seed,
        "progress": o.progress,
    }
    if o.net == "small":
        settings["padding"] = 2
    folder = o.out / f"{row.replace(' ', '-')}-{seed}"
    if row == "one way":
        epochs = round(o.share * o.epochs * len(o.budgets))
        return fastbcd.linearize(
            problem.dense,
            problem.train,
            o.budgets,
            epochs=epochs,
            run_dir=folder,
            **settings,
        )
    return [
        fastbcd.linearize(
            problem.dense,
            problem.train,
            budget,
            epochs=o.epochs,
            run_dir=folder / f"{budget}",
            **settings,
        )
        for budget in o.budgets
    ]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, batch=32)
    add = parser.add_argument
    add("--net", choices=NETS, default="resnet20", help="(%(default)s)")
    add("--budgets", type=int, nargs="+", help=f"({BUDGETS})")
    add("--rows", nargs="+", choices=ROWS, default=ROWS, help="(both)")
    add("--share", type=float, default=0.5, help="of the epochs (%(default)s)")
    add("--replacement", default="line", help="(%(default)s)")
    parser.set_defaults(epochs=12, samples=300, rt=2)
    o = parser.parse_args()
    if o.quick:
        tiny = {"images": 128, "samples": 64, "epochs": 2, "dense_epochs": 2}
        vars(o).update(tiny, net="small", seeds=[0])
    o.budgets = o.budgets or BUDGETS[o.net]
    o.out = o.out or Path("runs") / f"curve-{'quick' if o.quick else o.net}"
    return o


def main() -> None:
    o = options()
    problem = problem_of(o, o.net)
    judge = problem.held_out or problem.test
    print(machine())
    accuracies: dict[str, list[list[float]]] = {row: [] for row in o.rows}
    for seed in o.seeds:
        for row in o.rows:
            ends = runs(problem, o, row, seed)
            accuracies[row].append([fastbcd.accuracy(run.model, judge) for run in ends])
            epochs = sum(step.epochs or 0.0 for run in ends for step in run.history)
            cells = "".join(f"{accuracy:>9.2f}" for accuracy in accuracies[row][-1])
            print(f"{row:<10} seed {seed} {epochs:>5.0f} epochs {cells}", flush=True)
    print(f"\nmeans{'':<18}" + "".join(f"{budget:>9,}" for budget in o.budgets))
    for row, of_seeds in accuracies.items():
        cells = "".join(f"{mean(each):>9.2f}" for each in zip(*of_seeds, strict=True))
        print(f"{row:<23}{cells}")


if __name__ == "__main__":
    main()
