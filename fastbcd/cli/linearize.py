"""`fastbcd linearize`: the whole job, from a trained net to a budget in a number of epochs."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import fastbcd
from fastbcd.cli import budgets, inputs
from fastbcd.cli.options import call


def work(options: argparse.Namespace) -> None:
    """Linearize the net of --weights, or continue from --start."""
    data, test = inputs.load_data(options)
    net = inputs.trained_net(options, data)
    given: dict[str, Any] = {"model": net, "train": data, "test": test}
    if options.start is not None:
        given["start"] = inputs.given_net(options, data, options.start)
    fields = {field.name for field in dataclasses.fields(fastbcd.Finetune)} - {"epochs"}
    given |= {name: value for name, value in vars(options).items() if name in fields}
    given["budget"] = budgets.budget_of(options)
    given["teacher"] = inputs.given_teacher(options, data)
    run = call(fastbcd.linearize, options, **given)
    if not options.dry_run:
        last = run.history[-1].test_accuracy
        say = f"{run.masks.count():,} ReLUs kept, test {last:.2f} %"
        inputs.say(f"{say}; weights and masks: {options.run_dir}")
