"""The command `fastbcd`: it calls the file of a command."""

from __future__ import annotations

import argparse
import sys

from fastbcd import info
from fastbcd.cli import autorep, bcd, cost, demo, export, recipes, report, snl, train

COMMANDS = {
    "demo": (demo.main, "train a small ResNet on embedded images and remove most of its ReLUs"),
    "train": (train.main, "train a dense net, as a starting point and as a teacher"),
    "snl": (snl.main, "a starting point for bcd: removed ReLUs become linear"),
    "autorep": (autorep.main, "a starting point for bcd: removed ReLUs become quadratics"),
    "bcd": (bcd.main, "remove ReLUs by Block Coordinate Descent, or run one of the recipes"),
    "recipes": (recipes.main, "the paper's experiments by name, with their cost and results"),
    "report": (report.main, "write a page with figures of runs, beside the published results"),
    "cost": (cost.main, "bytes, rounds and seconds of the ReLUs kept in private inference"),
    "export": (export.main, "write a net that evaluates only the ReLUs kept, as .pt2 or .onnx"),
    "info": (info.main, "which kernels run here, and why others do not; --check compares them"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command with the rest of the arguments.

    >>> main(["info"])  # doctest: +SKIP
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="fastbcd",
        description="Remove ReLUs from trained networks by Block Coordinate Descent.",
        epilog="\n".join(f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command", choices=COMMANDS, metavar="command", help="one of the commands below"
    )
    options = parser.parse_args(arguments[:1])
    return COMMANDS[options.command][0](arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
