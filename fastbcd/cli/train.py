"""`fastbcd train`: a dense net by SNL's recipe, as a starting point and as a teacher."""

from __future__ import annotations

import argparse

from fastbcd.cli import options as common
from fastbcd.training.dense import train

TRAINING: common.Values = {
    "epochs": (160, ""),
    "lr": (0.1, ""),
    "momentum": (0.9, ""),
    "weight_decay": (5e-4, ""),
    "batch_size": (256, ""),
}


def main(arguments: list[str] | None = None) -> int:
    """Train the net of --arch or --model on --data."""
    parser = argparse.ArgumentParser(
        prog="fastbcd train",
        description="Train a dense net as SNL does: SGD, with the learning rate divided by 10 "
        "after a half and after three quarters of the epochs. The same command again resumes an "
        "interrupted run.",
    )
    common.add_net_options(parser)
    common.add_run_options(parser)
    common.add_values(parser, "training", TRAINING)
    options = parser.parse_args(arguments)
    options.run_dir = common.run_dir_of("train", options)
    return common.run_command(
        "train", lambda: _run(options), arguments=arguments, run_dir=options.run_dir
    )


def _run(options: argparse.Namespace) -> None:
    data, test = common.load_data(options)
    settings = {**common.chosen(options, TRAINING), **common.run_arguments(options, test)}
    trained = train(common.given_net(options, data, trained=False), data, **settings)
    last = trained.history[-1]["test_accuracy"] if trained.history else float("nan")
    common.say(f"{len(trained.history)} epochs, test {last:.2f} %; weights: {options.run_dir}")
