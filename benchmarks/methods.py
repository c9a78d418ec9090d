"""Compare methods at equal epochs and equal batches: SNL, BCD, linearize, AutoReP, DeepReDuce, ….

    FASTBCD_DATA=folder python benchmarks/methods.py                # ResNet-20 on CIFAR-10
    python benchmarks/methods.py --rows SNL linearize --seeds 0     # a part of it
    python benchmarks/methods.py --net small                        # the demo's net and images
    python benchmarks/methods.py --quick                            # a tiny version, minutes

The folder holds `cifar10-12k.npz` and `resnet20-cifar10.safetensors`. Every row goes from the dense
net to 20,000 and to 8,000 of ResNet-20's 188,416 ReLUs (3,000 and 1,200 of the small net's 28,224),
with every seed, in `--epochs` epochs of `--images` images in all, in batches of `--batch`, and
distills from the dense net:

    SNL, AutoReP        train masks until `--final` epochs are left, then fine-tune
    SNL lines           the same masks; removed ReLUs become lines before the fine-tune
    AutoReP tuned       the same masks; the fine-tune is that of `linearize` with quadratics
    BCD                 the paper: SNL down to 40,000 ReLUs, then uniform hypotheses, one epoch per
                        step, and a fine-tune of `--final` epochs
    DeepReDuce          trials of one epoch, and the rest for the net that is best
    SENet, ReLUPruner   half of the epochs for masks, half for the fine-tune
    linearize           `fastbcd.linearize`: removed ReLUs become lines; "linearize identity" and
                        "linearize poly": the identity, quadratics

Each row has a learning rate of its own: `--rates SENet=0.02` sets some. After the
table, BCD runs for more epochs (`--long`), until it is as accurate as linearize was after
`--epochs`. Every arm has run directories of its own below `--out`; the same command resumes. The
rows and seeds may run one by one; the same command with all of them then reports. Finished arms are
lines of `--records`, with the settings that they ran with: another machine, or a later day, reports
them without their run directories. `--report` runs nothing and reports what is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import fastbcd
from arms import NETS, Arm, Problem, add_options, problem_of
from table import machine

RECORDS = Path(__file__).with_name("methods.jsonl")
BUDGETS = {"resnet20": [20_000, 8_000], "small": [3_000, 1_200]}
REFERENCE = 40_000 / 188_416  # where SNL hands over to BCD: B_ref
WAN = {"bandwidth": "100Mbit", "rtt": "40ms"}
Result = dict[str, Any]


# ------------------------------------------------------------------------------------- rows


def start(arm: Arm, method: Callable[..., Any], budget: int, **settings: Any) -> None:
    """Run a starting point in the arm's folder and count its epochs and seconds."""
    o = arm.o
    point = method(
        arm.net, arm.problem.train, budget, teacher=arm.problem.dense, seed=arm.seed,
        batch_size=o.batch, run_dir=arm.folder / "start", progress=o.progress, **settings,
    )  # fmt: skip
    arm.net = point.model
    records = point.history + point.finetune
    arm.epochs += len(records)
    arm.seconds += sum(sum(record.seconds.values()) for record in records)


def snl(arm: Arm, budget: int) -> None:
    arm.snl(budget, arm.o.epochs - arm.o.final)


def snl_lines(arm: Arm, budget: int) -> None:
    snl(arm, budget)
    arm.net = fastbcd.to_line(arm.net, arm.problem.train)


def bcd(arm: Arm, budget: int) -> None:
    reference = round(REFERENCE * fastbcd.masks(arm.net).total)
    arm.snl(reference, arm.o.snl_epochs, arm.settings(arm.o.snl_tune))
    arm.descend(budget, budget / reference, proposal="uniform")


def autorep(arm: Arm, budget: int) -> None:
    o = arm.o
    arm.tuning = {"optimizer": "adam", "weight_decay": 0.0}  # as its mask training
    start(
        arm, fastbcd.autorep, budget, epochs=o.epochs - o.final, lr=o.autorep_lr,
        penalty=o.autorep_penalty,
    )  # fmt: skip


def autorep_tuned(arm: Arm, budget: int) -> None:
    autorep(arm, budget)
    arm.tuning = {"clip": 5.0}  # and SGD, as `linearize` with quadratics


def deepreduce(arm: Arm, budget: int) -> None:
    tune = arm.settings(0)
    start(
        arm, fastbcd.deepreduce, budget, epochs=arm.o.epochs, trial_epochs=1, lr=tune.lr,
        finetune=tune,
    )  # fmt: skip


def senet(arm: Arm, budget: int) -> None:
    o = arm.o
    arm.tuning = {"mismatch": o.mismatch}
    start(
        arm, fastbcd.senet, budget, epochs=o.epochs // 2, every=3, lr=o.lr, finetune=arm.settings(0)
    )  # fmt: skip


def relupruner(arm: Arm, budget: int) -> None:
    epochs = arm.o.epochs // 2
    batches = -(-len(arm.problem.train) // arm.o.batch)
    start(
        arm, fastbcd.relupruner, budget, epochs=epochs, warmup=min(1, epochs - 1), lr=arm.o.lr,
        interval=max(1, batches // 4), finetune=arm.settings(0),
    )  # fmt: skip


def linearize(arm: Arm, budget: int, replacement: str = "line") -> None:
    arm.linearize(budget, replacement=replacement, lr=arm.o.lr)


# Each with its learning rate of the fine-tune, or of its own training.
ROWS: dict[str, tuple[Callable[[Arm, int], None], float]] = {
    "SNL": (snl, 0.01),
    "SNL lines": (snl_lines, 0.003),
    "BCD": (bcd, 0.01),
    "linearize": (linearize, 0.003),
    "linearize identity": (partial(linearize, replacement="identity"), 0.01),
    "AutoReP": (autorep, 1e-4),
    "AutoReP tuned": (autorep_tuned, 0.003),
    "linearize poly": (partial(linearize, replacement="poly"), 0.01),
    "DeepReDuce": (deepreduce, 0.003),
    "SENet": (senet, 0.01),
    "ReLUPruner": (relupruner, 0.03),
}


# The options that a record must agree with: of all rows, and of each.
COMMON = ("net", "images", "epochs", "batch", "lr")
SNL = ("final", "snl_lr", "snl_lambda", "snl_kappa")
AUTOREP = ("final", "autorep_lr", "autorep_penalty")
SCORED = ("samples", "rt", "adt")
OWN: dict[str, tuple[str, ...]] = {
    "SNL": SNL,
    "SNL lines": SNL,
    "BCD": (*SNL, "snl_epochs", "snl_tune", *SCORED),
    "linearize": SCORED,
    "linearize identity": SCORED,
    "linearize poly": SCORED,
    "AutoReP": AUTOREP,
    "AutoReP tuned": AUTOREP,
    "SENet": ("mismatch",),
}


def recorded(path: Path, arm: Result) -> Result | None:
    """The last record that has the arm's values."""
    lines = path.read_text().splitlines() if path.exists() else []
    for line in reversed(lines):
        record = json.loads(line)
        if all(record.get(name) == value for name, value in arm.items()):
            return record
    return None


def options_of(o: argparse.Namespace, row: str, epochs: int) -> dict[str, Any]:
    """The options of one row."""
    samples = o.samples
    if row == "BCD":
        samples = o.bcd_samples
    lr = o.lr.get(row, ROWS[row][1])
    changed = {"lr": lr, "epochs": epochs, "snl_batch": o.batch, "samples": samples}
    return vars(o) | changed


def result(
    problem: Problem | None,
    o: argparse.Namespace,
    row: str,
    budget: int,
    *,
    seed: int,
    epochs: int,
) -> Result | None:
    """Run one arm, or read its record; None if there is none and no problem to run."""
    options = options_of(o, row, epochs)
    settings = {name: options[name] for name in (*COMMON, *OWN.get(row, ()))}
    facts = {"row": row, "budget": budget, "seed": seed, "settings": settings}
    record = recorded(o.records, facts)
    if record is not None or problem is None:
        return record
    name = f"{row} {budget}"
    if epochs != o.epochs:
        name += f" {epochs} epochs"
    work, _ = ROWS[row]

    def run(arm: Arm) -> Result:
        work(arm, budget)
        kept = fastbcd.masks(arm.net).counts().values()
        cost = fastbcd.private.cost(
            arm.net, "crypten", **WAN, activations_only=True
        ).known_seconds
        return {**facts, "sites": sum(n > 0 for n in kept), "private": cost}

    record = Arm(problem, argparse.Namespace(**options), name, seed).result(run)
    with o.records.open("a") as file:
        file.write(json.dumps(record) + "\n")
    text = f"{name}, seed {seed}: {record['accuracy']:.2f} %, "
    if "held_out" in record:
        text += f"held out {record['held_out']:.2f} %, "
    text += f"{record['epochs']} epochs, {record['seconds']:.0f} s"
    print(text, flush=True)
    return record


# ------------------------------------------------------------------------------------ report


def print_table(results: list[Result], o: argparse.Namespace) -> None:
    """One line for each row and budget: means over seeds, and each seed's accuracy."""
    columns = {"accuracy": "test %", "epochs": "epochs", "seconds": "seconds", "sites": "sites",
               "private": "private s"}  # fmt: skip
    for budget in o.budgets:
        print(f"\n{f'{budget:,} ReLUs':<20}" + "".join(f"{c:>10}" for c in columns.values())
              + "   each seed, %")  # fmt: skip
        for row in o.rows:
            seeds = [r for r in results if (r["row"], r["budget"]) == (row, budget)]
            if not seeds:
                print(f"{row:<20}{'not run':>10}")
                continue
            means = (mean(r[key] for r in seeds) for key in columns)
            cells = "{:>10.2f}{:>10.0f}{:>10.0f}{:>10.1f}{:>10.3f}".format(*means)
            print(
                f"{row:<20}{cells}   "
                + " / ".join(f"{r['accuracy']:.2f}" for r in seeds)
            )


def time_to_accuracy(
    problem: Problem | None, o: argparse.Namespace, results: list[Result]
) -> None:
    """How many epochs BCD needs to be as accurate as linearize."""
    print(f"\nepochs of BCD for the accuracy of linearize after {o.epochs}")
    for budget in o.budgets:
        for seed in o.seeds:
            accuracies = {
                r["row"]: r["accuracy"]
                for r in results
                if (r["budget"], r["seed"]) == (budget, seed)
            }
            if not {"BCD", "linearize"} <= set(accuracies):
                continue
            best = accuracies["BCD"]
            goal = accuracies["linearize"]
            text = f"{o.epochs}"
            for epochs in o.long:
                if best >= goal:
                    break
                longer = result(problem, o, "BCD", budget, seed=seed, epochs=epochs)
                if longer is None:
                    break
                best = max(best, longer["accuracy"])
                text = f"{epochs}"
            if best < goal:
                text = f"more than {text}: {best:.2f} %"
            print(f"{budget:>7,} ReLUs, seed {seed}, {goal:.2f} %: {text}", flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, batch=25)
    add = parser.add_argument
    add("--net", choices=NETS, default="resnet20", help="(%(default)s)")
    add("--budgets", type=int, nargs="+", help=f"({BUDGETS})")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="(all)")
    add("--rates", nargs="+", default=[], metavar="ROW=LR", help="learning rates")
    add(
        "--records",
        type=Path,
        help="finished arms, one per line (benchmarks/methods.jsonl)",
    )
    add("--report", action="store_true", help="run nothing, report the records")
    add(
        "--long",
        type=int,
        nargs="*",
        default=[60, 120],
        help="epochs of longer BCD (%(default)s)",
    )
    add("--bcd-samples", type=int, default=1_000, help="BCD scores on (%(default)s)")
    add(
        "--snl-epochs",
        type=int,
        default=8,
        help="of SNL's masks down to B_ref (%(default)s)",
    )
    add(
        "--snl-tune",
        type=int,
        default=2,
        help="epochs at B_ref before BCD (%(default)s)",
    )
    add("--autorep-lr", type=float, default=1e-3, help="of its masks (%(default)s)")
    add("--autorep-penalty", type=float, default=1000.0, help="(%(default)s)")
    add("--mismatch", type=float, default=0.1, help="of SENet (%(default)s)")
    parser.set_defaults(images=5_000, samples=500, epochs=30, final=5)
    o = parser.parse_args()
    if o.quick:
        vars(o).update(images=128, samples=64, bcd_samples=64, epochs=10, final=2, snl_epochs=2,
                       snl_tune=1, seeds=[0], dense_epochs=2, rt=2, long=[12])  # fmt: skip
    try:
        o.lr = {row: float(lr) for row, lr in (rate.split("=") for rate in o.rates)}
    except ValueError:
        parser.error(f"--rates {' '.join(o.rates)}: write ROW=LR, such as SENet=0.02")
    if unknown := set(o.lr) - set(ROWS):
        parser.error(
            f"--rates: no row is called {sorted(unknown)[0]}; choose from {list(ROWS)}"
        )
    o.budgets = o.budgets or BUDGETS["small" if o.quick else o.net]
    o.out = o.out or Path("runs") / f"methods-{'quick' if o.quick else o.net}"
    o.records = o.records or (o.out / "methods.jsonl" if o.quick else RECORDS)
    return o


def main() -> None:
    o = options()
    problem = None if o.report else problem_of(o, o.net)
    print(machine())
    if problem is not None:
        total = fastbcd.masks(problem.dense).total
        print(f"{total:,} ReLUs, {fastbcd.accuracy(problem.dense, problem.test):.2f} % on "
              f"{len(problem.test):,} test images; {' '.join(sys.argv)}", flush=True)  # fmt: skip
    # Seeds first: an interrupted experiment then has whole comparisons.
    arms = [
        result(problem, o, row, budget, seed=seed, epochs=o.epochs)
        for seed in o.seeds
        for budget in o.budgets
        for row in o.rows
    ]
    results = [arm for arm in arms if arm is not None]
    print_table(results, o)
    if {"BCD", "linearize"} <= set(o.rows):
        time_to_accuracy(problem, o, results)


if __name__ == "__main__":
    main()
