"""`fastbcd cost`: what the ReLUs kept by a run or a file of masks cost in private inference."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fastbcd import MaskSet, private
from fastbcd.cli import options as common
from fastbcd.runs.read import read


def main(arguments: list[str] | None = None) -> int:
    """Print the cost of each site and in total."""
    parser = argparse.ArgumentParser(
        prog="fastbcd cost",
        description="Bytes, rounds and seconds of the ReLUs kept, for one image, with the source "
        "of each value.",
    )
    add = parser.add_argument
    add("source", type=Path, metavar="RUN|MASKS", help="a run directory or a file of masks")
    add("--protocol", nargs="+", choices=private.PROTOCOLS, default=["crypten"], metavar="NAME",
        help=f"one or more of {', '.join(private.PROTOCOLS)} (crypten)")  # fmt: skip
    common.add_network_options(parser)
    add("--json", action="store_true", help="print a list with one object per protocol")
    options = parser.parse_args(arguments)
    return common.run_command("cost", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    masks, poly = read_masks(options.source)
    network = common.chosen(options, ("bandwidth", "rtt"))
    costs = [private.cost(masks, name, poly=poly, **network) for name in options.protocol]
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
    stage = read(path).last
    if stage.masks is None:
        raise ValueError(f"{stage.path} has no final masks yet: finish {stage.title} first")
    return stage.masks, stage.poly
