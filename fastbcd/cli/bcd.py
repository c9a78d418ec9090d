"""`fastbcd bcd`: Block Coordinate Descent on a net, with the paper's values as defaults."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn

import fastbcd
from fastbcd import recipes
from fastbcd.cli import options as common
from fastbcd.data.images import ImageData
from fastbcd.descent.bcd import WHEN, bcd
from fastbcd.descent.proposals import PROPOSALS, Saliency
from fastbcd.descent.schedules import Adaptive, Fraction
from fastbcd.descent.settings import Schedule
from fastbcd.masking.masks import masks
from fastbcd.recipes import run as chain
from fastbcd.runtime.validate import check_whole
from fastbcd.scoring.accuracy import accuracy
from fastbcd.scoring.engine import ENGINES, Engine
from fastbcd.training.finetune import OPTIMIZERS, Finetune

DRC = 100  # the paper's


def main(arguments: list[str] | None = None) -> int:
    """Remove ReLUs until --budget are left, or run a --recipe from its dense net on."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.budget is None) == (options.recipe is None):
        parser.error("give either --budget or --recipe")
    _refuse_idle(parser, options)
    if options.recipe is not None:
        try:
            recipe = recipes.get(options.recipe)
        except ValueError as error:
            parser.error(str(error))
        _refuse_fixed(parser, options)
        options.data = recipe.data
        run_dir = options.run_dir or common.Path("runs") / recipe.name
        if options.dry_run:
            print(recipes.plan(recipe))
            return 0
        return common.guarded(
            "bcd", arguments, run_dir, lambda: _run_recipe(options, recipe, run_dir)
        )
    options.run_dir = common.name_run("bcd", options, options.budget)
    return common.guarded("bcd", arguments, options.run_dir, lambda: _run(options))


# What may be said beside --recipe; the rest is the recipe's own.
WITH_RECIPE = ("recipe", "dry_run", "weights", "root", "run_dir", "seed", "device", "quiet",
               "samples", "engine")  # fmt: skip


# What does something beside another option only.
BESIDE = {
    "dry_run": ("--recipe", lambda options: options.recipe is not None),
    "saliency_temperature": ("--proposal saliency", lambda options: options.proposal == "saliency"),
    "scale_x2": ("--format autorep", lambda options: options.format == "autorep"),
    "teacher": ("--epochs of 1 or more", lambda options: options.epochs > 0),
}


def _refuse_idle(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """An option that would do nothing was meant to do something: say so instead."""
    for name, (other, there) in BESIDE.items():
        if getattr(options, name) != parser.get_default(name) and not there(options):
            parser.error(f"--{name.replace('_', '-')} goes with {other} only; leave it out")


def _refuse_fixed(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """An option that the recipe fixes, or does not know, would be ignored: say so instead."""
    for name, value in vars(options).items():
        if name not in WITH_RECIPE and value != parser.get_default(name):
            parser.error(
                f"--{name.replace('_', '-')} {value} does not go with --recipe, which fixes it; "
                f"leave one of them out"
            )


def _drc(text: str) -> int | Schedule:
    """A number of ReLUs, a share of those that are left, or a size that follows ADT.

    >>> [_drc(text) for text in ("100", "2%", "adaptive")]
    [100, Fraction(share=0.02, least=1), Adaptive(start=100, grow=1.25, shrink=0.5, least=1,
    most=None)]
    """
    if text == "adaptive":
        return Adaptive(DRC)
    try:
        if text.endswith("%"):
            return Fraction(float(text[:-1]) / 100)
        check_whole("drc", int(text), 1)
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is neither a number of ReLUs from 1 on, nor a share above 0% and up to 100%, "
            f"nor the word adaptive"
        ) from None


def _temperature(text: str) -> float:
    """Of `Saliency`; its own checks, as an error of the command line.

    >>> _temperature("inf")
    inf
    """
    try:
        return Saliency(float(text)).temperature
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is no temperature; give a number, 0 (greedy) or more"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastbcd bcd",
        description="Remove ReLUs by Block Coordinate Descent. The same command again goes on "
        "after an interruption, also on another number of ranks (torchrun -m fastbcd bcd …).",
    )
    common.add_net_options(parser)
    parser.add_argument("--format", choices=common.FORMATS, default="plain",
                        help="whose checkpoint --weights is (%(default)s)")  # fmt: skip
    parser.add_argument("--scale-x2", type=float, help="AutoReP's --scale_x2, for --format autorep")
    common.add_run_options(parser)
    group = parser.add_argument_group("descent")
    add = group.add_argument
    add(
        "--recipe",
        metavar="NAME",
        help="a row of the paper's tables: see fastbcd recipes; --weights is its dense net then, "
        "trained first if not given",
    )
    add("--dry-run", action="store_true", help="with --recipe: print its plan and stop")
    add("--budget", type=int, help="ReLUs to keep")
    add(
        "--drc",
        type=_drc,
        default=DRC,
        metavar="SIZE",
        help="ReLUs to remove a step: 100, or 8%% of those that are left, or adaptive, which "
        "is 100 at first, a quarter more after a step whose first hypothesis met ADT, and half as "
        "many after one where none did (%(default)s)",
    )
    add("--rt", type=int, default=50, help="hypotheses at most a step (%(default)s)")
    add("--adt", type=float, default=0.3, help="accepted drop, percentage points (%(default)s)")
    add("--proposal", choices=PROPOSALS, default="uniform",
        help="how hypotheses are drawn: uniform as the paper, or saliency, which favours ReLUs "
        "that matter little to first order (%(default)s)")  # fmt: skip
    add("--saliency-temperature", type=_temperature, metavar="T",
        help="with --proposal saliency: how far hypotheses stray from the least salient ReLUs; "
        f"0: not at all, inf: uniform ({Saliency().temperature})")  # fmt: skip
    add("--samples", type=int, help="score on the first n train images (all)")
    add("--engine", choices=ENGINES, default="auto", help="(%(default)s)")
    add("--wave", type=int, default=8, help="hypotheses scored together (%(default)s)")
    group = parser.add_argument_group("fine-tuning")
    add = group.add_argument
    add("--finetune-when", choices=WHEN, default="every_step", help="(%(default)s)")
    add("--teacher", type=common.Path, metavar="PATH", help="weights of the dense net (none)")
    add("--epochs", type=int, default=20, help="a step; 0: no fine-tuning (%(default)s)")
    add("--lr", type=float, default=1e-3, help="(%(default)s)")
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="(%(default)s)")
    add("--batch-size", type=int, default=128, help="(%(default)s)")
    add("--weight-decay", type=float, default=5e-4, help="(%(default)s)")
    add("--temperature", type=float, default=4.0, help="of the distillation (%(default)s)")
    add("--distill", type=float, default=1.0, help="weight of the distillation (%(default)s)")
    add("--compile", action="store_true", help="torch.compile the training step")
    return parser


def _run(options: argparse.Namespace) -> None:
    data, test = common.load_data(options)
    net = _net(options, data)
    finetune = Finetune(
        epochs=options.epochs, lr=options.lr, optimizer=options.optimizer,
        batch_size=options.batch_size, weight_decay=options.weight_decay,
        temperature=options.temperature, distill=options.distill, compile=options.compile,
    )  # fmt: skip
    if not options.quiet:
        kept = masks(net)
        say = f"{kept.count():,} of {kept.total:,} ReLUs, test {accuracy(net, test):.2f} %"
        plain = options.format == "plain"  # otherwise the file says which net it is
        name = (options.model or options.arch) if plain else options.weights
        common.say(f"{name} on {options.data}: {say}")
    proposal = options.proposal
    if options.saliency_temperature is not None:
        proposal = Saliency(options.saliency_temperature)
    run = bcd(
        net, data, options.budget, drc=options.drc, rt=options.rt, adt=options.adt,
        finetune=finetune if options.epochs else None, finetune_when=options.finetune_when,
        proposal=proposal, teacher=common.given_teacher(options, data), test=test,
        samples=options.samples, seed=options.seed, run_dir=options.run_dir,
        resume=options.resume, engine=Engine(options.engine, wave=options.wave),
        progress=not options.quiet,
    )  # fmt: skip
    _summary(run, options.run_dir)


def _run_recipe(options: argparse.Namespace, recipe: recipes.Recipe, run_dir: common.Path) -> None:
    data, test = common.load_data(options)
    dense = None
    if options.weights is not None:
        net = chain.build(recipe, options.seed).to(options.device)
        dense = common.load_weights(net, options.weights).eval()
    run = chain.run_recipe(
        recipe, run_dir, data, test, dense=dense, seed=options.seed, samples=options.samples,
        engine=options.engine, progress=not options.quiet,
    )  # fmt: skip
    _summary(run, run_dir)


def _net(options: argparse.Namespace, data: ImageData) -> nn.Module:
    """The net to descend from: --arch or --model with --weights, or an official checkpoint."""
    if options.format == "plain":
        return common.given_net(options, data)
    if options.weights is None:
        raise ValueError(f"--format {options.format} says whose checkpoint --weights is; give it")
    shape: dict[str, Any] = {"num_classes": data.classes, "image_size": data.images.shape[-1]}
    if options.format == "snl":
        net = fastbcd.load_snl(options.weights, **shape)
    elif options.format == "autorep":
        net = fastbcd.load_autorep(options.weights, scale_x2=options.scale_x2, **shape)
    else:
        net = fastbcd.load_relupruner(options.weights, **shape)
    common.say(str(net.import_report))
    return net.to(options.device)


def _summary(run: fastbcd.Run, run_dir: common.Path) -> None:
    last = run.history[-1].test_accuracy if run.history else None
    test = "" if last is None else f", test {last:.2f} %"
    common.say(f"{run.masks.count():,} ReLUs kept{test}; weights and masks: {run_dir}")
