"""`fastbcd report`: a page with figures of one or more runs, beside the published results."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastbcd import models, recipes, report
from fastbcd.cli.cost import bits_a_second, seconds
from fastbcd.cli.options import one_line_errors


def main(arguments: list[str] | None = None) -> int:
    """Write the page and say where it is."""
    options = _parser().parse_args(arguments)
    return one_line_errors("report", lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastbcd report",
        description="One HTML page, complete in itself, and its figures as PNG: accuracy against "
        "ReLU count beside the paper's curves, ReLUs by site, steps, time, masks, cost. Works on "
        "runs that are not finished, too.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN",
        help="a run directory of bcd, train, snl or autorep, or a recipe's; the first names the "
        "net and data set")  # fmt: skip
    add("--out", type=Path, metavar="FOLDER", help="where to (RUN/report)")
    add("--arch", choices=models.NAMES, metavar="NAME",
        help=f"whose published curves to draw, if the net is not recognised: "
        f"{', '.join(models.NAMES)}")  # fmt: skip
    add("--data", choices=recipes.DATA, metavar="NAME",
        help=f"the same for the data set: {', '.join(recipes.DATA)}")  # fmt: skip
    add("--baseline", type=float, metavar="PERCENT",
        help="the dense net's test accuracy (of a dense run among RUN…)")  # fmt: skip
    add("--bandwidth", type=bits_a_second, default=report.Network.bandwidth,
        help="for private inference, as in 100Mbit or 40MB/s (1Gbit)")  # fmt: skip
    add("--rtt", type=seconds, default=report.Network.rtt, help="round trip, as in 40ms (1ms)")
    return parser


def _run(options: argparse.Namespace) -> None:
    network = report.Network(options.bandwidth, options.rtt)
    out = options.out or options.runs[0] / "report"
    page = report.write(options.runs, out, arch=options.arch, data=options.data,
                        baseline=options.baseline, network=network)  # fmt: skip
    figures = len(list(page.parent.glob("*.png")))
    print(f"{page}: open it in a browser; the {figures} figures in it are beside it as PNG")
