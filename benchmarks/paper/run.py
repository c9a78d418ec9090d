"""The rows of the paper's tables: dense training, a starting point (SNL or AutoReP), then BCD.

    python benchmarks/paper/run.py                                     # all rows
    python benchmarks/paper/run.py resnet18-cifar100-15k --dry-run     # steps, epochs, PFLOP
    python benchmarks/paper/run.py resnet18-cifar100-15k --data data   # run or resume it
    python benchmarks/paper/run.py resnet18-cifar100-15k --tiny        # a small net, in seconds

Each stage is saved in a folder of its own in the run directory: 1-dense, 2-snl or 2-autorep, 3-bcd.
The same command resumes the stage that was interrupted; finished ones are only read. `fastbcd
report RUN_DIR` draws them. Rows are named net-data-budget, net-data-autorep-budget and
ablation-setting-value; rows.json holds their settings and the published accuracies.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastbcd
from fastbcd.runtime import ranks

TABLES = json.loads(Path(__file__).with_name("rows.json").read_text("utf-8"))
DENSE_EPOCHS = 160
SNL_EPOCHS = 300 + 100  # about 300 for the masks at 30K, and 100 of fine-tuning
AUTOREP_EPOCHS = {"cifar100": 200, "tiny-imagenet": 80}


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
        """The same stages with a small net, few images and one epoch each."""
        start_options: dict[str, Any] = {"epochs": 1}
        if self.start == "snl":
            finetune = fastbcd.Finetune(epochs=1, lr=1e-3)
            start_options = {"max_epochs": 1, "finetune": finetune}
        return dataclasses.replace(
            self,
            name=f"{self.name}-tiny",
            arch="resnet20",
            data="fashion-mnist-mini",
            b_ref=1_700,
            budget=1_600,
            drc=60,
            rt=2,
            epochs=1,
            net_options={"width": 1, "blocks": 1},
            dense_options={"epochs": 1},
            start_options=start_options,
            images=32,
        )


def every_row() -> dict[str, Row]:
    rows = [Row(*values) for values in TABLES["rows"]]
    return {row.name: row for row in rows}


# -------------------------------------------------------------------------------- the plan


def plan(row: Row) -> str:
    """Steps, epochs, passes and PFLOP of a row: 10¹⁵ FLOP, a multiply-add is 2.

    With F = 2 · multiply-adds of one image, N train images, T steps:
        dense         160 epochs · N · 3 F: forward and backward (2 F)
        start         its epochs · N · 4 F: with the teacher's forward
        scoring       at most T · RT passes, each N · F
        fine-tuning   T · epochs · N · 4 F
    """
    shape = row.shape()
    count = multiply_adds(row.build, shape)
    epoch = 2 * count * shape.images / 1e15  # one forward pass over the train set
    dense = DENSE_EPOCHS * 3 * epoch
    start = row.start_epochs() * 4 * epoch
    steps = row.steps()
    scoring = steps * row.rt * epoch
    finetuning = steps * row.epochs * 4 * epoch
    total = dense + start + scoring + finetuning
    title = {"snl": "SNL", "autorep": "AutoReP"}[row.start]
    lines = [
        f"{row.name} ({row.source}): {row.arch} on {row.data}, {shape.images:,} images, "
        f"{count / 1e9:.3g} G multiply-adds each",
        f"1  dense        {DENSE_EPOCHS} epochs: {dense:,.1f} PFLOP",
        f"2  {row.start:<12} to {row.b_ref:,} ReLUs, about {row.start_epochs()} epochs: "
        f"{start:,.1f} PFLOP",
        f"3  bcd          to {row.budget:,} ReLUs in {steps:,} steps of {row.drc}, "
        f"ADT {row.adt:g}, RT {row.rt}",
        f"   scoring      at most {steps * row.rt:,} passes: "
        f"{scoring:,.1f} PFLOP, {scoring / steps:.2f} per step",
        f"   fine-tuning  {steps * row.epochs:,} epochs, {row.epochs} per step, "
        f"{row.optimizer} {row.lr:g}: {finetuning:,.1f} PFLOP, {finetuning / steps:.2f} per step",
        f"total           about {total:,.0f} PFLOP",
        f"published       {title} {row.published_start:.2f} %, BCD {row.published:.2f} %",
    ]
    if row.note:
        lines.append(f"note            {row.note}")
    return "\n".join(lines)


def multiply_adds(build: Any, shape: DataShape) -> int:
    """Multiply-adds of one image, forward; nothing is computed."""
    with torch.device("meta"):
        net = build().eval()
        image = torch.zeros(1, shape.channels, shape.image_size, shape.image_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(image)
    return counter.get_total_flops() // 2


def table(rows: Sequence[Row]) -> str:
    """One line per row."""
    lines = [
        f"{'row':<32}{'B_ref':>9}{'budget':>9}{'steps':>7}{'start':>8}{'BCD':>7}  source"
    ]
    for row in rows:
        lines.append(
            f"{row.name:<32}{row.b_ref:>9,}{row.budget:>9,}{row.steps():>7,}"
            f"{row.published_start:>8.2f}{row.published:>7.2f}  {row.source}"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------- a run


def run(row: Row, run_dir: Path, data: Any, test: Any, *, seed: int = 0) -> fastbcd.Run:
    """Run or resume the three stages; returns the run of BCD."""
    shared: dict[str, Any] = {"test": test, "seed": seed, "progress": True}
    announce(f"1 of 3: {row.arch} with all its ReLUs")
    dense = fastbcd.train(
        row.build(seed).to(data.device),
        data,
        run_dir=run_dir / "1-dense",
        **row.dense_options,
        **shared,
    ).model.eval()
    announce(f"2 of 3: {row.start} to {row.b_ref:,} ReLUs")
    start_options = dict(row.start_options)
    if row.start == "autorep" and "epochs" not in start_options:
        start_options["epochs"] = row.start_epochs()
    method = getattr(fastbcd, row.start)
    start = method(
        copy.deepcopy(dense),
        data,
        row.b_ref,
        teacher=dense,
        run_dir=run_dir / f"2-{row.start}",
        **start_options,
        **shared,
    )
    announce(f"3 of 3: bcd to {row.budget:,} ReLUs")
    return fastbcd.bcd(
        start.model,
        data,
        row.budget,
        drc=row.drc,
        rt=row.rt,
        adt=row.adt,
        finetune=fastbcd.Finetune(
            epochs=row.epochs, lr=row.lr, optimizer=row.optimizer
        ),
        teacher=dense,
        run_dir=run_dir / "3-bcd",
        **shared,
    )


def announce(text: str) -> None:
    if ranks.rank() == 0:
        print(text, flush=True)


def load(row: Row, split: str, folder: Path | None, device: str) -> fastbcd.ImageData:
    data = fastbcd.load(row.data, split, folder)
    if row.images is not None:
        data = data.first(row.images)
    return data.to(device)


def main(arguments: list[str] | None = None) -> None:
    rows = every_row()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Run a row of the paper's tables.")
    parser.add_argument(
        "row", nargs="?", choices=rows, metavar="ROW", help="its name; none lists all"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print its plan and stop"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a small net on embedded images"
    )
    parser.add_argument("--run-dir", type=Path, help="where it is saved (runs/ROW)")
    parser.add_argument(
        "--data", type=Path, help="folder of the data ($FASTBCD_DATA, else ./data)"
    )
    parser.add_argument("--device", default=device, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    options = parser.parse_args(arguments)
    if options.row is None:
        print(table(list(rows.values())))
        return
    row = rows[options.row]
    if options.dry_run:
        print(plan(row))
        return
    if options.tiny:
        row = row.tiny()
    with ranks.joined(options.device):
        data = load(row, "train", options.data, options.device)
        test = load(row, "test", options.data, options.device)
        run_dir = options.run_dir or Path("runs") / row.name
        done = run(row, run_dir, data, test, seed=options.seed)
        accuracy = fastbcd.accuracy(done.model, test)
        announce(f"{done.masks.count():,} ReLUs kept, test {accuracy:.2f} %: {run_dir}")


if __name__ == "__main__":
    main()
