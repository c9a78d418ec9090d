"""The rows of the paper's tables, each as published and by `linearize`.

    python benchmarks/paper/run.py                                     # the rows, and GPU hours
    python benchmarks/paper/run.py resnet18-cifar100-15k --dry-run     # stages, epochs, PFLOP
    python benchmarks/paper/run.py resnet18-cifar100-15k --data data   # run or resume it
    python benchmarks/paper/run.py resnet18-cifar100-15k --method linearize --epochs 60
    python benchmarks/paper/run.py --all --tiny                        # every row, on small nets

As published: dense training, a starting point (SNL or AutoReP) down to B_ref ReLUs, then BCD. By
`linearize`: the same dense net, then `fastbcd.linearize` in a stated number of epochs, with lines,
and with quadratics in the rows that start from AutoReP.

Stages are saved in folders below --out. Rows of the same net share its dense training, and those of
the same B_ref the starting point. The same command resumes the stage that was interrupted; finished
ones are only read. Each finished row is one line of results.jsonl there, with the published
accuracy. Rows are named net-data-budget, net-data-autorep-budget and ablation-setting-value;
rows.json holds their settings and the published accuracies.

GPU hours are estimates from the number of operations; no row has run on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastbcd
from fastbcd.runtime import ranks

TABLES = json.loads(Path(__file__).with_name("rows.json").read_text("utf-8"))
METHODS = ("published", "linearize")
DENSE_EPOCHS = 160
SNL_EPOCHS = 300 + 100  # about 300 for the masks at 30K, and 100 of fine-tuning
AUTOREP_EPOCHS = {"cifar100": 200, "tiny-imagenet": 80}
LINEARIZE_EPOCHS = 60
# Of one A100, in TFLOP/s: assumed, not measured. Training in bfloat16, scoring in float32.
TRAINING_SPEED = 30
SCORING_SPEED = 15
TITLES = {"snl": "SNL", "autorep": "AutoReP"}


class DataShape(NamedTuple):
    """The size of a data set."""

    classes: int
    image_size: int
    channels: int
    images: int  # of the train set


@dataclasses.dataclass(frozen=True)
class Row:
    """One experiment: a dense net, a starting point with b_ref ReLUs, BCD down to budget."""

    name: str
    arch: str
    data: str
    start: str  # "snl" | "autorep"
    b_ref: int
    budget: int
    drc: int
    adt: float
    rt: int
    epochs: int  # of fine-tuning per step
    optimizer: str
    lr: float
    published_start: float  # percent: SNL or AutoReP directly at the budget
    published: float  # percent: BCD
    source: str
    note: str
    # What --tiny makes smaller.
    net_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dense_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    start_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    images: int | None = None

    @property
    def net(self) -> str:
        """What the dense net is called in names of folders."""
        return f"{self.arch}-{self.data}"

    @property
    def replacement(self) -> str:
        """What `linearize` makes of removed ReLUs."""
        return {"snl": "line", "autorep": "poly"}[self.start]

    def shape(self) -> DataShape:
        return DataShape(*TABLES["data"][self.data])

    def build(self, seed: int = 0) -> nn.Module:
        """The dense net, with initial weights that depend on the seed only."""
        shape = self.shape()
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return fastbcd.models.build(
                self.arch,
                shape.classes,
                shape.image_size,
                in_channels=shape.channels,
                **self.net_options,
            )

    def steps(self) -> int:
        return math.ceil((self.b_ref - self.budget) / self.drc)

    def start_epochs(self) -> int:
        """The epochs of the starting point, about: SNL ends when it reaches the budget."""
        if self.start == "snl":
            return SNL_EPOCHS
        return AUTOREP_EPOCHS[self.data]

    def tiny(self) -> Row:
        """The same stages with a narrow net, few images and one epoch each."""
        start_options: dict[str, Any] = {"epochs": 1}
        if self.start == "snl":
            finetune = fastbcd.Finetune(epochs=1, lr=1e-3)
            start_options = {"max_epochs": 1, "finetune": finetune}
        return dataclasses.replace(
            self,
            name=f"{self.name}-tiny",
            data="fashion-mnist-mini",
            b_ref=1_700,
            budget=1_600,
            drc=60,
            rt=2,
            epochs=1,
            net_options={"resnet18": {"width": 2}}.get(self.arch, {"factor": 1}),
            dense_options={"epochs": 1},
            start_options=start_options,
            images=32,
        )


def every_row() -> dict[str, Row]:
    rows = [Row(*values) for values in TABLES["rows"]]
    return {row.name: row for row in rows}


# -------------------------------------------------------------------------------- the plan


class Work(NamedTuple):
    """The operations of a stage in PFLOP, 10¹⁵; a multiply-add is 2."""

    stage: str
    text: str
    training: float
    scoring: float = 0.0

    @property
    def hours(self) -> float:
        """On one A100, an estimate."""
        seconds = self.training / TRAINING_SPEED + self.scoring / SCORING_SPEED
        return 1000 * seconds / 3600


def work(row: Row, method: str, epochs: int) -> list[Work]:
    """The stages of a row.

    With F = 2 · multiply-adds of one image, N train images, T steps:
        dense         160 epochs · N · 3 F: forward and backward (2 F)
        start         its epochs · N · 4 F: with the teacher's forward
        bcd           T · epochs · N · 4 F, and scoring: at most T · RT passes, each N · F
        linearize     epochs · N · 4 F; it scores on 500 images, which is not counted
    """
    forward = 2 * multiply_adds(row) * row.shape().images / 1e15  # over the train set
    dense = DENSE_EPOCHS * 3 * forward
    stages = [Work("dense", f"{DENSE_EPOCHS} epochs", dense)]
    if method == "linearize":
        text = f"to {row.budget:,} ReLUs in {epochs} epochs, {row.replacement}"
        return [*stages, Work("linearize", text, epochs * 4 * forward)]
    steps = row.steps()
    text = f"to {row.b_ref:,} ReLUs, about {row.start_epochs()} epochs"
    stages.append(Work(row.start, text, row.start_epochs() * 4 * forward))
    text = (
        f"to {row.budget:,} ReLUs in {steps:,} steps of {row.drc}, ADT {row.adt:g}, "
        f"RT {row.rt}, {row.epochs} epochs each by {row.optimizer} {row.lr:g}"
    )
    training = steps * row.epochs * 4 * forward
    return [*stages, Work("bcd", text, training, steps * row.rt * forward)]


def plan(row: Row, method: str, epochs: int) -> str:
    """What a row does, and the operations and hours that it takes."""
    shape = row.shape()
    lines = [
        f"{row.name} ({row.source}), {method}: {row.arch} on {row.data}, "
        f"{shape.images:,} images, {multiply_adds(row) / 1e9:.3g} G multiply-adds each"
    ]
    stages = work(row, method, epochs)
    for stage in stages:
        pflop = f"training {stage.training:,.1f} PFLOP"
        if stage.scoring:
            pflop += f", scoring at most {stage.scoring:,.1f}"
        lines.append(f"{stage.stage:<10}{stage.text}: {pflop}, {stage.hours:,.1f} h")
    hours = sum(stage.hours for stage in stages)
    lines.append(f"{'total':<10}about {hours:,.1f} hours of an A100, an estimate")
    lines.append(
        f"{'published':<10}{TITLES[row.start]} {row.published_start:.2f} %, "
        f"BCD {row.published:.2f} %"
    )
    if row.note:
        lines.append(f"{'note':<10}{row.note}")
    return "\n".join(lines)


def multiply_adds(row: Row) -> int:
    """Multiply-adds of one image, forward; nothing is computed."""
    return _multiply_adds(row.arch, *row.shape())


@functools.cache
def _multiply_adds(arch: str, classes: int, size: int, channels: int, _: int) -> int:
    with torch.device("meta"):
        net = fastbcd.models.build(arch, classes, size, in_channels=channels).eval()
        image = torch.zeros(1, channels, size, size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(image)
    return counter.get_total_flops() // 2


def table(rows: Iterable[Row], epochs: int) -> str:
    """One line per row; the hours are estimates."""
    titles = ("B_ref", "budget", "start %", "BCD %", "hours", "linearize")
    lines = [f"{'row':<32}" + "".join(f"{title:>10}" for title in titles) + "  source"]
    for row in rows:
        hours = [sum(w.hours for w in work(row, method, epochs)) for method in METHODS]
        lines.append(
            f"{row.name:<32}{row.b_ref:>10,}{row.budget:>10,}"
            f"{row.published_start:>10.2f}{row.published:>10.2f}"
            f"{hours[0]:>10,.1f}{hours[1]:>10,.1f}  {row.source}"
        )
    lines.append(
        f"hours: of one A100, estimated at {TRAINING_SPEED} TFLOP/s in training and "
        f"{SCORING_SPEED} in scoring, dense training and starting point included"
    )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------- a run


class Stages:
    """The stages of one row: each runs or resumes in its folder below `out`."""

    def __init__(self, row: Row, out: Path, data: Any, test: Any, seed: int) -> None:
        self.row = row
        self.out = out
        self.data = data
        self.shared: dict[str, Any] = {"test": test, "seed": seed}
        self.shared["progress"] = row.images is None  # a tiny row takes no time to plan

    def folder(self, stage: str) -> Path:
        announce(stage)
        return self.out / f"{stage}-{self.shared['seed']}"

    def dense(self) -> nn.Module:
        """The net with all its ReLUs."""
        row = self.row
        net = row.build(self.shared["seed"]).to(self.data.device)
        run_dir = self.folder(f"dense-{row.net}")
        fastbcd.train(
            net, self.data, run_dir=run_dir, **row.dense_options, **self.shared
        )
        return net.eval()

    def start(self, dense: nn.Module) -> Any:
        """SNL or AutoReP down to B_ref."""
        row = self.row
        options = dict(row.start_options)
        if row.start == "autorep" and "epochs" not in options:
            options["epochs"] = row.start_epochs()
        return getattr(fastbcd, row.start)(
            copy.deepcopy(dense),
            self.data,
            row.b_ref,
            teacher=dense,
            run_dir=self.folder(f"{row.start}-{row.net}-{row.b_ref}"),
            **options,
            **self.shared,
        )

    def published(self, dense: nn.Module, _: int) -> fastbcd.Run:
        """The starting point, then BCD, with epochs of their own."""
        row = self.row
        finetune = fastbcd.Finetune(
            epochs=row.epochs, lr=row.lr, optimizer=row.optimizer
        )
        return fastbcd.bcd(
            self.start(dense).model,
            self.data,
            row.budget,
            drc=row.drc,
            rt=row.rt,
            adt=row.adt,
            finetune=finetune,
            teacher=dense,
            run_dir=self.folder(f"{row.name}-bcd"),
            **self.shared,
        )

    def linearize(self, dense: nn.Module, epochs: int) -> fastbcd.Run:
        """The dense net to the budget in one call."""
        row = self.row
        return fastbcd.linearize(
            dense,
            self.data,
            row.budget,
            epochs=epochs,
            replacement=row.replacement,
            run_dir=self.folder(f"{row.name}-linearize-{epochs}"),
            **self.shared,
        )

    def result(self, method: str, epochs: int) -> dict[str, Any]:
        """Run the row by one of METHODS: what it came to, beside what was published."""
        row = self.row
        dense = self.dense()
        ways = {"published": self.published, "linearize": self.linearize}
        run = ways[method](dense, epochs)
        test = self.shared["test"]
        accuracy = fastbcd.accuracy(run.model, test)
        return {
            "row": row.name,
            "method": method,
            "seed": self.shared["seed"],
            "epochs": round(sum(step.epochs or 0.0 for step in run.history), 6),
            "relus": run.masks.count(),
            "dense": fastbcd.accuracy(dense, test),
            "accuracy": accuracy,
            "published": row.published,
            "difference": round(accuracy - row.published, 4),
        }


def announce(text: str) -> None:
    if ranks.rank() == 0:
        print(text, flush=True)


def record(path: Path, result: dict[str, Any]) -> None:
    """Print a result and add its line to a file, unless it is there."""
    line = json.dumps(result)
    announce(line)
    if ranks.rank() > 0:
        return
    lines = path.read_text().splitlines() if path.exists() else []
    if line not in lines:
        path.write_text("\n".join([*lines, line, ""]))


def load(row: Row, split: str, folder: Path | None, device: str) -> fastbcd.ImageData:
    data = fastbcd.load(row.data, split, folder)
    if row.images is not None:
        data = data.first(row.images)
    return data.to(device)


def parser() -> argparse.ArgumentParser:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Run rows of the paper's tables.")
    add = parser.add_argument
    add("rows", nargs="*", metavar="ROW", help="their names; none lists all")
    add("--all", action="store_true", help="all rows")
    add("--method", choices=METHODS, default="published", help="(%(default)s)")
    add(
        "--epochs",
        type=int,
        default=LINEARIZE_EPOCHS,
        help="of linearize (%(default)s)",
    )
    add("--dry-run", action="store_true", help="print the plan and stop")
    add("--tiny", action="store_true", help="small nets on embedded images")
    add("--out", type=Path, help="where stages are saved (runs/paper)")
    add("--data", type=Path, help="folder of the data ($FASTBCD_DATA, else ./data)")
    add("--device", default=device, help="(%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    rows = every_row()
    names = list(rows) if options.all else options.rows
    if unknown := set(names) - set(rows):
        parser().error(
            f"no row is called {min(unknown)}; without a name all are listed"
        )
    if not names:
        print(table(rows.values(), options.epochs))
        return
    out = options.out or Path("runs") / ("paper-tiny" if options.tiny else "paper")
    with ranks.joined(options.device):
        for name in names:
            row = rows[name]
            if options.dry_run:
                announce(plan(row, options.method, options.epochs))
                continue
            if options.tiny:
                row = row.tiny()
            train, test = (
                load(row, split, options.data, options.device)
                for split in ("train", "test")
            )
            stages = Stages(row, out, train, test, options.seed)
            result = stages.result(options.method, options.epochs)
            record(out / "results.jsonl", result)


if __name__ == "__main__":
    main()
