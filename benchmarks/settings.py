"""What linearize chooses, against other choices: one row per change, at equal epochs.

    FASTBCD_DATA=folder python benchmarks/settings.py                    # ResNet-20 on CIFAR-10
    python benchmarks/settings.py --net small --images 4000 --budget 1000  # the demo's net
    python benchmarks/settings.py --rows linearize "one step per epoch"  # some rows
    python benchmarks/settings.py --quick                                # a tiny version, minutes

Every row is `fastbcd.linearize` from the dense net to `--budget` ReLUs in `--epochs` epochs of
`--images` images, with one setting changed. Accuracies are measured on the train images that no arm
trains on, not on test images: settings are chosen here. "loss" is that of the last epoch. Every arm
has run directories of its own below `--out`; the same command resumes, also with more rows, seeds.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import fastbcd
from arms import NETS, Arm, Problem, add_options, problem_of
from table import machine

# Constants of fastbcd/descent/linearize.py in capitals, arguments of `linearize` in small letters.
ROWS: dict[str, dict[str, Any]] = {
    "linearize": {},
    "identity": {"replacement": "identity"},
    "quadratics": {"replacement": "poly"},
    "one step per epoch": {"PARTS": 1},
    "two steps per epoch": {"PARTS": 2},
    "eight steps per epoch": {"PARTS": 8},
    "down in 40 %": {"DOWN": 0.4},
    "down in 80 %": {"DOWN": 0.8},
    "lr 0.001": {"lr": 0.001},
    "lr 0.01": {"lr": 0.01},
    "Adam, lr 0.001": {"optimizer": "adam", "lr": 0.001, "weight_decay": 0.0},
    "gradients of norm 5 at most": {"clip": 5.0},
    "one hypothesis": {"rt": 1},
    "activations matched": {"mismatch": 1.0},
    "half of the sites": {"max_sites": 0.5},
}
Result = dict[str, Any]


def result(problem: Problem, o: argparse.Namespace, row: str, seed: int) -> Result:
    """Run one arm, or read its result."""
    constants = {name: value for name, value in ROWS[row].items() if name.isupper()}
    settings = {name: ROWS[row][name] for name in ROWS[row] if name not in constants}
    if "max_sites" in settings:
        sites = len(fastbcd.masks(problem.dense).sites)
        settings["max_sites"] = int(settings["max_sites"] * sites)
    options = argparse.Namespace(**{**vars(o), "rt": settings.pop("rt", o.rt)})
    arm = Arm(problem, options, f"{row} {o.budget}".replace("%", "percent"), seed)

    def work(arm: Arm) -> Result:
        with ExitStack() as stack:
            for name, value in constants.items():
                stack.enter_context(patch(f"fastbcd.descent.linearize.{name}", value))
            history = arm.linearize(o.budget, **settings)
        sites = sum(n > 0 for n in fastbcd.masks(arm.net).counts().values())
        return {"row": row, "loss": history[-1].train_loss, "sites": sites}

    facts = arm.result(work)
    text = f"{row}, seed {seed}: {facts['accuracy']:.2f} %, loss {facts['loss']:.3f}, "
    text += f"{facts['sites']} sites, {facts['seconds']:.0f} s"
    print(text, flush=True)
    return facts


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, batch=25)
    parser.add_argument("--net", choices=NETS, default="resnet20", help="(%(default)s)")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=list(ROWS), help="(all)"
    )
    parser.add_argument("--budget", type=int, default=8_000, help="ReLUs (%(default)s)")
    parser.set_defaults(samples=500)
    o = parser.parse_args()
    if o.quick:
        vars(o).update(
            images=128, samples=64, epochs=3, seeds=[0], dense_epochs=2, budget=500
        )
    o.out = o.out or Path("runs") / f"settings-{'quick' if o.quick else o.net}"
    return o


def main() -> None:
    o = options()
    problem = problem_of(o, o.net)
    if problem.held_out is not None:
        problem = problem._replace(test=problem.held_out, held_out=None)
    print(machine())
    print(f"accuracy on {len(problem.test):,} images that no arm trains on", flush=True)
    results = [result(problem, o, row, seed) for seed in o.seeds for row in o.rows]
    print(
        f"\n{f'{o.budget:,} ReLUs':<24}{'valid %':>8}{'loss':>8}{'sites':>7}   each seed, %"
    )
    for row in o.rows:
        seeds = [r for r in results if r["row"] == row]
        means = (mean(r[key] for r in seeds) for key in ("accuracy", "loss", "sites"))
        each = " / ".join(f"{r['accuracy']:.2f}" for r in seeds)
        print(f"{row:<24}" + "{:>8.2f}{:>8.3f}{:>7.1f}".format(*means) + f"   {each}")


if __name__ == "__main__":
    main()
