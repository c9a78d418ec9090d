"""`fastbcd report`: a page with figures of one or more runs, beside the published results."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastbcd import models, recipes, report
from fastbcd.cli import options as common


def main(arguments: list[str] | None = None) -> int:
    """Write the page and print its path."""
    parser = argparse.ArgumentParser(
        prog="fastbcd report",
        description="Write one self-contained HTML page and its figures as PNG: accuracy against "
        "ReLU count beside the paper's curves, ReLUs by site, steps, time, masks, cost. Runs need "
        "not be finished.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN",
        help="a run directory of bcd, train, snl or autorep, or a recipe's; the first one "
        "determines the net and the data set")  # fmt: skip
    add("--out", type=Path, metavar="FOLDER", help="where to write (RUN/report)")
    add("--arch", choices=models.NAMES, metavar="NAME",
        help="whose published curves to draw, if the run did not record its net: "
        f"{', '.join(models.NAMES)}")  # fmt: skip
    add("--data", choices=recipes.DATA, metavar="NAME",
        help=f"the same for the data set: {', '.join(recipes.DATA)}")  # fmt: skip
    add("--baseline", type=float, metavar="PERCENT",
        help="test accuracy of the dense net (that of a dense run among RUN…)")  # fmt: skip
    common.add_network_options(parser)
    options = parser.parse_args(arguments)
    return common.run_command("report", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    network = report.Network(**common.chosen(options, ("bandwidth", "rtt")))
    page = report.write(
        options.runs, options.out or options.runs[0] / "report", network=network,
        **common.chosen(options, ("arch", "data", "baseline")),
    )  # fmt: skip
    figures = len(list(page.parent.glob("*.png")))
    print(f"{page}: open it in a browser; its {figures} figures are beside it as PNG")
