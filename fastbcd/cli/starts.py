"""The commands of the starting points, with published values as defaults."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import fastbcd
from fastbcd.cli import budgets, inputs
from fastbcd.cli.options import call


def work(method: Any, options: argparse.Namespace) -> None:
    """Train masks on the net of --weights, down to the budget, and report the result."""
    data, test = inputs.load_data(options)
    net, teacher = inputs.trained_net(options, data), inputs.given_teacher(options, data)
    tuning = {"epochs": options.finetune_epochs, "lr": options.finetune_lr}
    start = call(
        method, options, net=net, data=data, test=test, teacher=teacher,
        budget=budgets.budget_of(options), finetune=call(fastbcd.Finetune, options, **tuning),
    )  # fmt: skip
    a = start.accuracy
    inputs.say(
        f"{start.masks.count():,} ReLUs after {len(start.history)} epochs; test accuracy "
        f"{a['trained']:.2f} % with trained masks, {a['thresholded']:.2f} % rounded to bits, "
        f"{a['final']:.2f} % at the end; weights and masks: {options.run_dir}"
    )


NAMES = ("snl", "autorep", "deepreduce", "senet", "relupruner")
METHODS = {name: partial(work, getattr(fastbcd, name)) for name in NAMES}
