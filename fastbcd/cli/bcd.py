"""`fastbcd bcd`: Block Coordinate Descent on a net, with the paper's values as defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from torch import nn

import fastbcd
from fastbcd import recipes
from fastbcd.cli import options as common
from fastbcd.data.images import ImageData
from fastbcd.descent.bcd import WHEN
from fastbcd.descent.proposals import PROPOSALS
from fastbcd.descent.schedules import Schedule
from fastbcd.recipes import run as recipe_run
from fastbcd.runtime.validate import check_whole
from fastbcd.scoring.engine import ENGINES
from fastbcd.training.settings import OPTIMIZERS

DRC = 100  # the paper's value
LOADERS: dict[str, Callable[..., nn.Module]] = {
    "snl": fastbcd.load_snl,
    "autorep": fastbcd.load_autorep,
    "relupruner": fastbcd.load_relupruner,
}
SEARCH: common.Values = {
    "rt": (50, "hypotheses per step, at most"),
    "adt": (0.3, "accepted drop of accuracy, in percentage points"),
}
FINETUNING: common.Values = {
    "epochs": (20, "per step; 0: no fine-tuning"),
    "lr": (1e-3, ""),
    "batch_size": (128, ""),
    "momentum": (0.9, "of SGD"),
    "weight_decay": (5e-4, ""),
    "padding": (4, "of the random crop"),
    **common.DISTILLATION,
}
# The options that can be given with --recipe; the recipe fixes the others.
WITH_RECIPE = ("recipe", "dry_run", "weights", "root", "download", "run_dir", "seed", "device",
               "quiet", "samples", "engine")  # fmt: skip
# Options that need another one: what they need, and whether it is there.
NEEDS = {
    "dry_run": ("--recipe", lambda options: options.recipe is not None),
    "saliency_temperature": ("--proposal saliency", lambda options: options.proposal == "saliency"),
    "scale_x2": ("--format autorep", lambda options: options.format == "autorep"),
    "teacher": ("--epochs of 1 or more", lambda options: options.epochs > 0),
}


def main(arguments: list[str] | None = None) -> int:
    """Remove ReLUs until --budget are left, or run a --recipe with all its stages."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.budget is None) == (options.recipe is None):
        parser.error("give either --budget or --recipe")
    given = {k: v for k, v in vars(options).items() if v != parser.get_default(k)}
    for name in given:
        if name in NEEDS and not NEEDS[name][1](options):
            parser.error(f"{common.flag(name)} goes with {NEEDS[name][0]} only; leave it out")
    if options.recipe is None:
        options.run_dir = common.run_dir_of("bcd", options, options.budget)
        work = _run
    else:
        try:
            recipe = recipes.get(options.recipe)
        except ValueError as error:
            parser.error(str(error))
        for name in given.keys() - WITH_RECIPE:
            parser.error(
                f"{common.flag(name)} {given[name]} does not go with --recipe, which fixes it; "
                f"leave one of them out"
            )
        if options.dry_run:
            print(recipes.plan(recipe))
            return 0
        options.data, options.run_dir = recipe.data, options.run_dir or Path("runs") / recipe.name
        work = _run_recipe
    return common.run_command(
        "bcd", lambda: work(options), arguments=arguments, run_dir=options.run_dir
    )


def _drc(text: str) -> int | Schedule:
    """A number of ReLUs, a share of those that are left, or `adaptive`.

    >>> [_drc(text) for text in ("100", "2%", "adaptive")]
    [100, Fraction(share=0.02, least=1), Adaptive(start=100, grow=1.25, shrink=0.5, least=1,
    most=None)]
    """
    if text == "adaptive":
        return fastbcd.Adaptive(DRC)
    try:
        if text.endswith("%"):
            return fastbcd.Fraction(float(text[:-1]) / 100)
        check_whole("drc", int(text), 1)
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is neither a number of ReLUs, 1 or more, nor a share above 0% and up to 100%, "
            f"nor the word adaptive"
        ) from None


def temperature(text: str) -> float:
    """
    >>> temperature("inf")
    inf
    """
    return fastbcd.Saliency(float(text)).temperature


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastbcd bcd",
        description="Remove ReLUs by Block Coordinate Descent. The same command again resumes an "
        "interrupted run, also on another number of ranks (torchrun -m fastbcd bcd …).",
    )
    common.add_net_options(parser)
    parser.add_argument("--format", choices=("plain", *LOADERS), default="plain",
                        help="whose checkpoint --weights is (%(default)s)")  # fmt: skip
    parser.add_argument("--scale-x2", type=float, help="AutoReP's --scale_x2, for --format autorep")
    common.add_run_options(parser)
    add = common.add_values(parser, "search", SEARCH).add_argument
    add("--recipe", metavar="NAME",
        help="a row of the paper's tables, see fastbcd recipes; --weights is then its dense net, "
        "which is trained first if not given")  # fmt: skip
    add("--dry-run", action="store_true", help="with --recipe: print its plan and stop")
    add("--budget", type=int, help="ReLUs to keep")
    add("--drc", type=_drc, default=DRC, metavar="SIZE",
        help="ReLUs to remove per step: 100, or 8%% of those that are left, or adaptive: 100 at "
        "first, 25%% more after a step whose first hypothesis met ADT, half as many after a step "
        "in which none did (%(default)s)")  # fmt: skip
    add("--proposal", choices=PROPOSALS, default="uniform",
        help="how hypotheses are drawn: uniform as in the paper, or saliency, which favours ReLUs "
        "with little effect to first order (%(default)s)")  # fmt: skip
    add("--saliency-temperature", type=temperature, metavar="T",
        help="with --proposal saliency: 0 takes the least salient ReLUs, inf draws uniformly "
        f"({fastbcd.Saliency().temperature})")  # fmt: skip
    add("--samples", type=int, help="score on the first n train images (all)")
    add("--engine", choices=ENGINES, default="auto", help="(%(default)s)")
    add("--wave", type=int, default=8, help="hypotheses scored together (%(default)s)")
    add = common.add_values(parser, "fine-tuning", FINETUNING).add_argument
    add("--finetune-when", choices=WHEN, default="every_step", help="(%(default)s)")
    add("--teacher", type=Path, metavar="PATH", help="weights of the dense net (none)")
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="(%(default)s)")
    add("--flip", action=argparse.BooleanOptionalAction, default=True, help="random flips")
    add("--amp", action=argparse.BooleanOptionalAction, help="bfloat16 autocast (on CUDA only)")
    add("--compile", action="store_true", help="torch.compile the training step")
    return parser


def _run(options: argparse.Namespace) -> None:
    data, test = common.load_data(options)
    net = _net(options, data)
    if not options.quiet:
        masks, accuracy = fastbcd.masks(net), fastbcd.accuracy(net, test)
        plain = options.format == "plain"  # otherwise the file determines the net
        name = (options.model or options.arch) if plain else options.weights
        common.say(f"{name} on {options.data}: {masks.count():,} of {masks.total:,} ReLUs, test "
                   f"{accuracy:.2f} %")  # fmt: skip
    tuning = common.chosen(options, (*FINETUNING, "optimizer", "flip", "amp", "compile"))
    proposal = options.proposal
    if options.saliency_temperature is not None:
        proposal = fastbcd.Saliency(options.saliency_temperature)
    run = fastbcd.bcd(
        net, data, options.budget, proposal=proposal, teacher=common.given_teacher(options, data),
        finetune=fastbcd.Finetune(**tuning) if options.epochs else None,
        engine=fastbcd.Engine(options.engine, wave=options.wave),
        **common.chosen(options, (*SEARCH, "drc", "samples", "finetune_when")),
        **common.run_arguments(options, test),
    )  # fmt: skip
    _say_result(run, options.run_dir)


def _run_recipe(options: argparse.Namespace) -> None:
    recipe, dense = recipes.get(options.recipe), None
    data, test = common.load_data(options)
    if options.weights is not None:
        net = recipe_run.build(recipe, options.seed).to(options.device)
        dense = common.load_weights(net, options.weights).eval()
    run = recipe_run.run_recipe(
        recipe, options.run_dir, data, test=test, dense=dense, progress=not options.quiet,
        **common.chosen(options, ("seed", "samples", "engine")),
    )  # fmt: skip
    _say_result(run, options.run_dir)


def _net(options: argparse.Namespace, data: ImageData) -> nn.Module:
    """The net to start from: --arch or --model with --weights, or an official checkpoint."""
    if options.format == "plain":
        return common.given_net(options, data)
    if options.weights is None:
        raise ValueError(f"--format {options.format} needs --weights, the checkpoint")
    scale = {"scale_x2": options.scale_x2} if options.format == "autorep" else {}
    size = {"num_classes": data.classes, "image_size": data.images.shape[-1]}
    net = LOADERS[options.format](options.weights, **size, **scale)
    common.say(str(net.import_report))
    return net.to(options.device)


def _say_result(run: fastbcd.Run, run_dir: Path) -> None:
    last = run.history[-1].test_accuracy if run.history else None
    test = "" if last is None else f", test {last:.2f} %"
    common.say(f"{run.masks.count():,} ReLUs kept{test}; weights and masks: {run_dir}")
