"""`fastbcd bcd`: Block Coordinate Descent on a net, with the paper's values as defaults."""

from __future__ import annotations

import argparse

from torch import nn

import fastbcd
from fastbcd.cli import budgets, inputs
from fastbcd.cli.options import call
from fastbcd.data.images import ImageData

# Options that need another one: what they need, and whether it is there.
NEEDS = {
    "saliency_temperature": ("--proposal saliency", lambda options: options.proposal == "saliency"),
    "scale_x2": ("--format autorep", lambda options: options.format == "autorep"),
    "teacher": ("--epochs of 1 or more", lambda options: options.epochs > 0),
}


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse options that do not go together."""
    for name, value in vars(options).items():
        flag = f"--{name.replace('_', '-')}"
        if value == parser.get_default(name):
            continue
        if name in NEEDS and not NEEDS[name][1](options):
            parser.error(f"{flag} goes with {NEEDS[name][0]} only; leave it out")


def work(options: argparse.Namespace) -> None:
    """Remove ReLUs until the budget or the target is met."""
    data, test = inputs.load_data(options)
    run = _run(options, data, test)
    if options.dry_run:
        return
    last = run.history[-1].test_accuracy if run.history else None
    tested = "" if last is None else f", test {last:.2f} %"
    inputs.say(f"{run.masks.count():,} ReLUs kept{tested}; weights and masks: {options.run_dir}")


def _run(options: argparse.Namespace, data: ImageData, test: ImageData) -> fastbcd.Run:
    net = _net(options, data)
    if options.progress:
        masks, accuracy = fastbcd.masks(net), fastbcd.accuracy(net, test)
        plain = options.format == "plain"  # otherwise the file determines the net
        name = (options.model or options.arch) if plain else options.weights
        kept = f"{masks.count():,} of {masks.total:,} ReLUs"
        inputs.say(f"{name} on {options.data}: {kept}, test {accuracy:.2f} %")
    proposal, temperature = options.proposal, options.saliency_temperature
    return call(
        fastbcd.bcd, options, net=net, data=data, test=test, budget=budgets.budget_of(options),
        proposal=proposal if temperature is None else fastbcd.Saliency(temperature),
        teacher=inputs.given_teacher(options, data),
        finetune=call(fastbcd.Finetune, options) if options.epochs else None,
        engine=fastbcd.Engine(options.engine, wave=options.wave, precision=options.precision),
    )  # fmt: skip


def _net(options: argparse.Namespace, data: ImageData) -> nn.Module:
    """The net to start from: --arch or --model with --weights, or an official checkpoint."""
    if options.format == "plain":
        return inputs.trained_net(options, data)
    if options.weights is None:
        raise ValueError(f"--format {options.format} needs --weights, the checkpoint")
    load, size = getattr(fastbcd, f"load_{options.format}"), data.images.shape[-1]
    net = call(load, options, path=options.weights, arch=None, num_classes=data.classes,
               image_size=size)  # fmt: skip
    inputs.say(str(net.import_report))
    return net.to(options.device)
