"""`fastbcd train`: a dense net by SNL's recipe, as a starting point and as a teacher."""

from __future__ import annotations

import argparse

import fastbcd
from fastbcd.cli import inputs
from fastbcd.cli.options import call


def work(options: argparse.Namespace) -> None:
    """Train the net of --arch or --model on --data."""
    data, test = inputs.load_data(options)
    net = inputs.given_net(options, data, options.weights)
    trained = call(fastbcd.train, options, net=net, data=data, test=test)
    last = trained.history[-1].test_accuracy if trained.history else float("nan")
    inputs.say(f"{len(trained.history)} epochs, test {last:.2f} %; weights: {options.run_dir}")
