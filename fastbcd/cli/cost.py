"""`fastbcd cost`: what the ReLUs kept by a run or a file of masks cost in private inference."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fastbcd import MaskSet, load_run, private
from fastbcd.cli.options import call


def work(options: argparse.Namespace) -> None:
    """Print the cost of each site and in total."""
    masks, poly = read_masks(options.source)
    costs = [
        call(private.cost, options, masks=masks, protocol=name, poly=poly)
        for name in options.protocol
    ]
    if options.json:
        print(json.dumps([cost.as_dict() for cost in costs], indent=2, ensure_ascii=False))
    else:
        print("\n\n".join(map(str, costs)))


def read_masks(path: Path) -> tuple[MaskSet, tuple[str, ...]]:
    """The masks of a run or of a file that `MaskSet.save` wrote, and the sites with quadratics.

    A file of masks does not contain quadratics: its removed ReLUs count as the identity.
    """
    if path.is_file():
        return MaskSet.load(path), ()
    run = load_run(path)
    if run.masks is None:
        raise ValueError(f"{path} has no final masks yet: finish {run.title} first")
    return run.masks, run.poly
