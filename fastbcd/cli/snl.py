"""`fastbcd snl`: a starting point for BCD by SNL, with the published values as defaults."""

from __future__ import annotations

import argparse

from fastbcd.cli import options as common
from fastbcd.cli.starts import add_start_options, say_result, start_arguments
from fastbcd.starts.snl import snl


def main(arguments: list[str] | None = None) -> int:
    """Linearise the net of --weights down to --budget ReLUs."""
    options = _parser().parse_args(arguments)
    options.run_dir = common.name_run("snl", options, options.budget)
    return common.guarded("snl", arguments, options.run_dir, lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastbcd snl",
        description="Selective Network Linearization: masks as numbers, trained with the weights "
        "under a growing penalty, then cut to bits and fine-tuned. The same command again goes "
        "on after an interruption.",
    )
    add_start_options(parser, epochs=100)
    add = parser.add_argument_group("mask training").add_argument
    add("--lr", type=float, default=1e-3, help="of Adam (%(default)s)")
    add("--lambda0", type=float, default=1e-5, help="the penalty's first weight (%(default)s)")
    add("--kappa", type=float, default=1.1, help="its growth (%(default)s)")
    add("--threshold", type=float, default=1e-2, help="below it a ReLU is gone (%(default)s)")
    add("--max-epochs", type=int, default=2000, help="(%(default)s)")
    add("--as-published", action="store_true",
        help="keep what is above the threshold, mostly fewer than --budget")  # fmt: skip
    return parser


def _run(options: argparse.Namespace) -> None:
    positional, keywords = start_arguments(options)
    start = snl(
        *positional, **keywords, lr=options.lr, lambda0=options.lambda0, kappa=options.kappa,
        threshold=options.threshold, max_epochs=options.max_epochs, exact=not options.as_published,
    )  # fmt: skip
    say_result(start, options.run_dir)
