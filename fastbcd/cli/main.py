"""The command `fastbcd`: parses the arguments of a command and runs it, with errors of one line."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from fastbcd import info
from fastbcd.cli import bcd, budgets, cost, demo, export, linearize, report, starts, train
from fastbcd.cli.inputs import say
from fastbcd.cli.options import TABLE, parser_of
from fastbcd.runtime import ranks

COMMANDS = TABLE["commands"]  # their help and options
WORK: dict[str, Callable[[argparse.Namespace], None]] = {
    "demo": lambda options: demo.show(options.run_dir), "linearize": linearize.work,
    "train": train.work, **starts.METHODS, "bcd": bcd.work,
    "report": report.work, "cost": cost.work, "export": export.work,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run a command with the rest of the arguments; returns the exit status.

    >>> main(["cost", "nothing"])
    2
    """
    first, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    parser = argparse.ArgumentParser(
        prog="fastbcd",
        description="Remove ReLUs from trained networks by Block Coordinate Descent.",
        epilog="\n".join(f"  {name:<10} {about['help']}" for name, about in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below")
    command = parser.parse_args([first]).command
    return info.main(rest) if command == "info" else run(command, rest)


def run(command: str, arguments: list[str]) -> int:
    """Run a command on every rank; errors of the user are one line."""
    parser = parser_of(command)
    options = parser.parse_args(arguments)
    if "budget" in options:
        budgets.check(options, parser)
    if command == "bcd":
        bcd.check(options, parser)
    run_dir = getattr(options, "run_dir", None)
    if "run_dir" in options and run_dir is None:
        run_dir = options.run_dir = _default_run_dir(command, options)
    try:
        with ranks.joined(getattr(options, "device", "cpu")):
            WORK[command](options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        again = f"fastbcd {command} {shlex.join(arguments)}"
        if run_dir is not None and run_dir.exists():
            say(f"\ninterrupted; what was finished is in {run_dir}. To resume:\n  {again}")
        else:
            say(f"\ninterrupted before anything was saved. To start again:\n  {again}")
        return 130
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        if ranks.world() > 1:
            raise
        print(f"fastbcd {command}: {error}", file=sys.stderr)
        return 2
    return 0


def _default_run_dir(command: str, options: argparse.Namespace) -> Path:
    net = options.model.replace(":", ".") if options.model else options.arch
    return Path("runs") / "-".join([command, net, Path(options.data).stem, *budgets.parts(options)])
