"""`fastbcd demo`: a small ResNet on embedded images, from all its ReLUs to a few hundred.

Trains the dense net, takes SNL's masks as the starting point, descends by BCD, and prints a table.
With matplotlib there is a picture too. Every number is computed there and then, in a minute or
two on 2 cores; run it again and it goes on where it was stopped, or says that it is done.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import fastbcd
from fastbcd.cli import options as common
from fastbcd.scoring.accuracy import accuracy
from fastbcd.training.finetune import Finetune

START, BUDGET = 5_000, 300  # ReLUs of the starting point, and in the end
# The images are small and centred: without crops and flips the teacher has one view of each.
PLAIN: dict[str, Any] = {"padding": 0, "flip": False, "batch_size": 64}


class Point(NamedTuple):
    """What a stage came to."""

    name: str
    relus: int
    accuracy: float  # test, percent
    counts: dict[str, int]  # ReLUs kept by site


def main(arguments: list[str] | None = None) -> int:
    """Run the stages in --run-dir, or what is left of them, and show the result."""
    parser = argparse.ArgumentParser(prog="fastbcd demo", description=__doc__)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="(%(default)s)")
    options = parser.parse_args(arguments)
    return common.guarded("demo", arguments, options.run_dir, lambda: show(options.run_dir))


def small_resnet() -> nn.Module:
    """A narrow ResNet-8 for 28×28 images: 28,224 ReLUs.

    >>> fastbcd.masks(small_resnet()).count()
    28224
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return fastbcd.models.resnet20(10, image_size=28, in_channels=1, width=8, blocks=1)


def show(run_dir: Path, images: int = 6_000, tests: int = 2_000) -> None:
    """All stages on the first `images` train and `tests` test images; the table, the picture."""
    train = fastbcd.load("fashion-mnist-mini", "train").first(images)
    test = fastbcd.load("fashion-mnist-mini", "test").first(tests)
    dense = small_resnet()
    say = common.say
    say(f"1. a dense net: {fastbcd.masks(dense).count():,} ReLUs")
    fastbcd.train(
        dense, train, epochs=5, lr=0.05, test=test, run_dir=run_dir / "1-dense", progress=True,
        **PLAIN,
    )  # fmt: skip
    say(f"2. the starting point: SNL, down to {START:,} ReLUs")
    start = fastbcd.snl(
        copy.deepcopy(dense), train, START, test=test, lr=1e-2, lambda0=1e-3, max_epochs=5,
        batch_size=64, finetune=Finetune(epochs=1, lr=1e-2, distill=0.0, **PLAIN),
        run_dir=run_dir / "2-snl", progress=True,
    )  # fmt: skip
    points = [_point("dense", dense, test), _point("SNL", start.model, test)]
    say(f"3. BCD, down to {BUDGET:,} ReLUs, a quarter of what is left each step")
    run = fastbcd.bcd(
        start.model, train, BUDGET, drc=fastbcd.Fraction(0.25), rt=6, adt=0.3,
        samples=min(2_000, images), finetune=Finetune(epochs=2, lr=3e-3, **PLAIN), teacher=dense,
        test=test, proposal="saliency", run_dir=run_dir / "3-bcd", progress=True,
    )  # fmt: skip
    points.append(_point("BCD", run.model, test))
    say(f"\n{table(points, run.history)}")
    say(picture(points, run.history, run_dir / "demo.png"))


def _point(name: str, net: nn.Module, test: fastbcd.ImageData) -> Point:
    masks = fastbcd.masks(net)
    return Point(name, masks.count(), accuracy(net, test), masks.counts())


# ------------------------------------------------------------------------------- what is shown


def table(points: list[Point], history: list[fastbcd.Step]) -> str:
    """Accuracy by stage and step, and the ReLUs of every site before and after."""
    dense, start, end = points
    rows = [f"{'':10} {'ReLUs':>8} {'test':>8} {'seconds':>8}"]
    rows += [f"{p.name:10} {p.relus:>8,} {p.accuracy:>7.2f}%" for p in (dense, start)]
    rows += [
        f"{f'step {s.number}':10} {s.after:>8,} {s.test_accuracy:>7.2f}% "
        f"{sum(s.seconds.values()):>8.1f}"
        for s in history
    ]
    rows.append(f"\n{'site':18} {'dense':>8} {'SNL':>8} {'BCD':>8}")
    rows += [
        f"{site:18} {n:>8,} {start.counts[site]:>8,} {end.counts[site]:>8,}"
        for site, n in dense.counts.items()
    ]
    return "\n".join(rows)


def picture(points: list[Point], history: list[fastbcd.Step], path: Path) -> str:
    """Accuracy against ReLU count, and the counts by site; where it was saved, or why not."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: {error}; pip install 'fastbcd[plot]'"
    dense, start, _ = points
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(
        [start.relus, *(s.after for s in history)],
        [start.accuracy, *(s.test_accuracy or 0.0 for s in history)],
        "o-", label="BCD",
    )  # fmt: skip
    left.plot([start.relus], [start.accuracy], "s", label="SNL, the start")
    left.plot([dense.relus], [dense.accuracy], "D", label="dense")
    left.set(xscale="log", xlabel="ReLUs", ylabel="test accuracy, %", title="Fashion-MNIST, small")
    left.grid(alpha=0.3)
    left.legend()
    places = range(len(dense.counts))
    for shift, point in zip((-0.27, 0.0, 0.27), points, strict=True):
        right.bar([p + shift for p in places], point.counts.values(), 0.26, label=point.name)
    right.set(yscale="log", ylabel="ReLUs kept", title="by site")
    right.set_xticks(places, dense.counts, rotation=45, ha="right")
    right.margins(y=0.3)  # room for the legend
    right.legend(ncols=3, loc="upper center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return f"picture: {path}"
