"""What `fastbcd snl` and `fastbcd autorep` have in common."""

from __future__ import annotations

import argparse

from fastbcd.cli import options as common
from fastbcd.starts.mask_training import StartingPoint
from fastbcd.training.finetune import Finetune


def add_start_options(parser: argparse.ArgumentParser, epochs: int) -> None:
    """Options of both; epochs of the fine-tune."""
    parser.add_argument("--budget", type=int, required=True, help="ReLUs to keep")
    common.add_net_options(parser)
    common.add_run_options(parser)
    add = parser.add_argument_group("fine-tuning and distillation").add_argument
    add(
        "--teacher", type=common.Path, metavar="PATH", help="weights of the teacher (the net's own)"
    )
    add("--finetune-epochs", type=int, default=epochs,
        help="after the masks are fixed (%(default)s)")  # fmt: skip
    add("--finetune-lr", type=float, default=1e-3, help="(%(default)s)")
    add("--temperature", type=float, default=4.0, help="of the distillation (%(default)s)")
    add("--distill", type=float, default=1.0, help="weight of the distillation (%(default)s)")
    add("--batch-size", type=int, default=128, help="(%(default)s)")


def start_arguments(options: argparse.Namespace) -> tuple[tuple, dict]:
    """The net and the data, and the keywords that `snl` and `autorep` share."""
    data, test = common.load_data(options)
    net = common.given_net(options, data)
    finetune = Finetune(
        epochs=options.finetune_epochs, lr=options.finetune_lr, batch_size=options.batch_size,
        temperature=options.temperature, distill=options.distill,
    )  # fmt: skip
    keywords = {
        "teacher": common.given_teacher(options, data), "test": test, "finetune": finetune,
        "batch_size": options.batch_size, "seed": options.seed, "run_dir": options.run_dir,
        "resume": options.resume, "progress": not options.quiet,
    }  # fmt: skip
    return (net, data, options.budget), keywords


def say_result(start: StartingPoint, run_dir: common.Path) -> None:
    """The last line of the command."""
    a = start.accuracy
    common.say(
        f"{start.masks.count():,} ReLUs after {len(start.history)} epochs; test {a['trained']:.2f} "
        f"% with trained masks, {a['thresholded']:.2f} % cut to bits, {a['final']:.2f} % in the "
        f"end; weights and masks: {run_dir}"
    )
