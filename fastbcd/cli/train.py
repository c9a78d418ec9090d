"""`fastbcd train`: a dense net by SNL's recipe, to start from and as a teacher."""

from __future__ import annotations

import argparse

from fastbcd.cli import options as common
from fastbcd.training.dense import train


def main(arguments: list[str] | None = None) -> int:
    """Train the net of --arch or --model on --data."""
    options = _parser().parse_args(arguments)
    options.run_dir = common.name_run("train", options)
    return common.guarded("train", arguments, options.run_dir, lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastbcd train",
        description="Train a dense net as SNL does: SGD, lr divided by 10 after a half and after "
        "three quarters of the epochs. The same command again goes on after an interruption.",
    )
    common.add_net_options(parser)
    common.add_run_options(parser)
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=int, default=160, help="(%(default)s)")
    group.add_argument("--lr", type=float, default=0.1, help="(%(default)s)")
    group.add_argument("--momentum", type=float, default=0.9, help="(%(default)s)")
    group.add_argument("--weight-decay", type=float, default=5e-4, help="(%(default)s)")
    group.add_argument("--batch-size", type=int, default=256, help="(%(default)s)")
    return parser


def _run(options: argparse.Namespace) -> None:
    data, test = common.load_data(options)
    trained = train(
        common.given_net(options, data), data, epochs=options.epochs, lr=options.lr,
        momentum=options.momentum, weight_decay=options.weight_decay,
        batch_size=options.batch_size, test=test, seed=options.seed, run_dir=options.run_dir,
        resume=options.resume, progress=not options.quiet,
    )  # fmt: skip
    last = trained.history[-1]["test_accuracy"] if trained.history else float("nan")
    common.say(f"{len(trained.history)} epochs, test {last:.2f} %; weights: {options.run_dir}")
