"""`fastbcd demo`: a small ResNet on embedded images, from all its ReLUs to a few hundred."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastbcd
from fastbcd import Finetune
from fastbcd.cli.inputs import say
from fastbcd.runs.read import Stages, read

START, BUDGET = 5_000, 300  # ReLUs of the starting point, and of the result
# The images are small and centred, so crops and flips are not needed.
PLAIN: dict[str, Any] = {"padding": 0, "flip": False, "batch_size": 64}


def small_resnet() -> nn.Module:
    """A narrow ResNet-8 for 28×28 images: 28,224 ReLUs.

    >>> fastbcd.masks(small_resnet()).count()
    28224
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return fastbcd.models.resnet20(10, image_size=28, in_channels=1, width=8, blocks=1)


def show(run_dir: Path, images: int = 6_000, tests: int = 2_000) -> None:
    """Run or resume all stages on so many train and test images, and show the results."""
    train = fastbcd.load("fashion-mnist-mini", "train").first(images)
    test = fastbcd.load("fashion-mnist-mini", "test").first(tests)
    dense = small_resnet()
    say(f"1. a dense net: {fastbcd.masks(dense).count():,} ReLUs")
    fastbcd.train(dense, train, epochs=5, lr=0.05, test=test, run_dir=run_dir / "1-dense",
                  progress=True, **PLAIN)  # fmt: skip
    say(f"2. the starting point: SNL, down to {START:,} ReLUs")
    start = fastbcd.snl(
        copy.deepcopy(dense), train, START, test=test, lr=1e-2, lambda0=1e-3, max_epochs=5,
        batch_size=64, finetune=Finetune(epochs=1, lr=1e-2, distill=0.0, **PLAIN),
        run_dir=run_dir / "2-snl", progress=True,
    )  # fmt: skip
    say(f"3. BCD, down to {BUDGET:,} ReLUs, removing a quarter of them per step")
    fastbcd.bcd(
        start.model, train, BUDGET, drc=fastbcd.Fraction(0.25), rt=6, adt=0.3,
        samples=min(2_000, images), finetune=Finetune(epochs=2, lr=3e-3, **PLAIN), teacher=dense,
        test=test, proposal="saliency", run_dir=run_dir / "3-bcd", progress=True,
    )  # fmt: skip
    say(f"\n{table(read(run_dir))}")
    try:
        say(f"a page with figures: {fastbcd.report.write([run_dir], run_dir / 'report')}")
    except ImportError as error:
        say(f"no page with figures: {error}")


def table(run: Stages) -> str:
    """Accuracy of each stage and step, and the ReLUs of each site."""
    row = "{:10} {:>8,} {:>7.2f}%"
    lines = [f"{'':10} {'ReLUs':>8} {'test':>8} {'seconds':>8}"]
    lines += [row.format(s.title, s.count, s.accuracy) for s in run.stages[:2]]
    for step in run.last.history:
        text = row.format(f"step {step['number']}", step["after"], step["test_accuracy"])
        lines.append(f"{text} {sum(step['seconds'].values()):>8.1f}")
    lines.append(f"\n{'site':18}" + "".join(f" {stage.title:>8}" for stage in run.stages))
    counts = [stage.masks.counts() for stage in run.stages if stage.masks is not None]
    lines += [f"{site:18}" + "".join(f" {c[site]:>8,}" for c in counts) for site in counts[0]]
    return "\n".join(lines)
