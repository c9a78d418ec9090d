"""`fastbcd cost`: what the ReLUs kept by a run or a file of masks cost in private inference."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from fastbcd import MaskSet, private
from fastbcd.cli.options import call
from fastbcd.private.costs import seconds_text
from fastbcd.runs.stages import Stages, read


def work(options: argparse.Namespace) -> None:
    """Print the cost of each site and in total, and what a run's nets cost on the way."""
    masks, poly = read_masks(options.source)
    run = None if options.source.is_file() else read(options.source)
    costs, texts = [], []
    for name in options.protocol:
        cost_of = partial(call, private.cost, options, protocol=name, poly=poly)
        costs.append(cost_of(masks=masks))
        texts.append(str(costs[-1]) + (accuracies(run, cost_of) if run else ""))
    if options.json:
        print(json.dumps([cost.as_dict() for cost in costs], indent=2, ensure_ascii=False))
    else:
        print("\n\n".join(texts))


def accuracies(run: Stages, cost_of: Callable[..., private.Cost], most: int = 12) -> str:
    """Test accuracy against ReLUs and seconds: starts, and at most so many nets on BCD's way."""
    nets = [(s, p) for s in run.stages if s.kind != "bcd" and (p := s.point())]
    if run.bcd and (curve := [p for p in run.curve() if p.sites is not None]):
        every = np.linspace(0, len(curve) - 1, min(len(curve), most)).round().astype(int)
        nets += [(run.bcd, curve[i]) for i in every]
    lines = ["", "  test accuracy:", f"    {'ReLUs':>9}{'sites':>7}{'seconds':>12}{'test':>10}"]
    for stage, point in nets:
        cost, used = cost_of(masks=stage.masks_at(point)), sum(n > 0 for n in point.sites or ())
        time = seconds_text(cost)
        lines.append(f"    {point.relus:>9,}{used:>7}{time:>12}{point.accuracy:>8.2f} %")
    return "\n".join(lines) if nets else ""


def read_masks(path: Path) -> tuple[MaskSet, tuple[str, ...]]:
    """The masks of a run or of a file that `MaskSet.save` wrote, and the sites with quadratics.

    A file of masks does not contain quadratics: its removed ReLUs count as the identity.
    """
    if path.is_file():
        return MaskSet.load(path), ()
    stage = read(path).last
    if stage.masks is None:
        raise ValueError(f"{stage.path} has no final masks yet: finish {stage.title} first")
    return stage.masks, stage.poly
