"""`fastbcd autorep`: a starting point for BCD by AutoReP, with the published values as defaults."""

from __future__ import annotations

import argparse

from fastbcd.cli import options as common
from fastbcd.cli.starts import add_start_options, say_result, start_arguments
from fastbcd.starts.autorep import autorep


def main(arguments: list[str] | None = None) -> int:
    """Replace the ReLUs of the net of --weights by quadratics, down to --budget ReLUs."""
    options = _parser().parse_args(arguments)
    options.run_dir = common.name_run("autorep", options, options.budget)
    return common.guarded("autorep", arguments, options.run_dir, lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastbcd autorep",
        description="AutoReP: removed ReLUs become quadratics, which are trained together with the "
        "weights and with the numbers that decide on each ReLU. Give the result to `fastbcd bcd "
        "--replacement poly --weights RUN_DIR`. The same command again goes on after an "
        "interruption.",
    )
    add_start_options(parser, epochs=0)
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=int, default=200, help="(%(default)s)")
    add("--lr", type=float, default=1e-3, help="of Adam, at first (%(default)s)")
    add("--lr-end", type=float, default=1e-5, help="and at the end of the cosine (%(default)s)")
    add("--penalty", type=float, help="weight of the density (the published one for the budget)")
    add("--threshold", type=float, default=0.003, help="of the hysteresis (%(default)s)")
    add("--paper-quirks", action="store_true",
        help="begin with the quadratics that the authors' code computes")  # fmt: skip
    add("--scale-x2", type=float, default=1.0,
        help="factor on the quadratic coefficient at the start (%(default)s)")  # fmt: skip
    return parser


def _run(options: argparse.Namespace) -> None:
    positional, keywords = start_arguments(options)
    start = autorep(
        *positional, **keywords, epochs=options.epochs, lr=options.lr, lr_end=options.lr_end,
        penalty=options.penalty, threshold=options.threshold, paper_quirks=options.paper_quirks,
        scale_x2=options.scale_x2,
    )  # fmt: skip
    say_result(start, options.run_dir)
