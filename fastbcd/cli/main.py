"""The command `fastbcd`: parses the arguments of a command and runs it, with errors of one line."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from typing import Any

import fastbcd
from fastbcd import info
from fastbcd.cli import demo, private, reading, runs
from fastbcd.cli.inputs import Inputs, complete
from fastbcd.cli.options import add_options, call
from fastbcd.private import Target
from fastbcd.runtime import ranks
from fastbcd.runtime.show import say

# What each command does, and what else has parameters that are its options.
COMMANDS: dict[str, list[Callable[..., Any]]] = {
    "demo": [demo.demo],
    "linearize": [runs.linearize, fastbcd.linearize, Target, Inputs],
    "train": [runs.train, fastbcd.train, Inputs],
    "bcd": [runs.bcd, fastbcd.bcd, fastbcd.Finetune, Target, Inputs],
    "report": [reading.report, fastbcd.report.write],
    "cost": [reading.cost, fastbcd.private.cost],
    "export": [reading.export],
    "private serve": [private.serve],
    "private ask": [private.ask],
    "info": [info.info],
}
for name in ("snl", "autorep", "deepreduce", "senet", "relupruner"):
    method = getattr(fastbcd, name)
    COMMANDS[name] = [runs.starting_point(name), method, runs.tuned, Target, Inputs]


def parser() -> ArgumentParser:
    """The parser of all commands; the first line of a command's docstring is its help."""
    whole = ArgumentParser(prog="fastbcd", description=inspect.getdoc(fastbcd))
    whole.add_argument(
        "--version", action="version", version=f"fastbcd {fastbcd.__version__}"
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")
    groups: Any = {"": commands}
    for name, sources in COMMANDS.items():
        about, _, _ = (inspect.getdoc(sources[0]) or "").partition("\n\nArgs")
        group, _, word = name.rpartition(" ")
        if group not in groups:
            parent = commands.add_parser(group, help="inference between two machines")
            groups[group] = parent.add_subparsers(required=True, metavar="command")
        added = groups[group].add_parser(
            word,
            help=about.partition("\n")[0],
            description=about,
            formatter_class=RawDescriptionHelpFormatter,
        )
        added.set_defaults(command=name)
        add_options(added, sources)
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Run a command with its arguments; returns the exit status.

    >>> main(["cost", "nothing"])
    2
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(words or ["--help"])
    options.options = options  # for the commands that pass them to other functions
    work, *others = COMMANDS[options.command]
    if Inputs in others:
        complete(options)
    try:
        with ranks.joined(getattr(options, "device", "cpu")):
            status = call(work, options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        again = f"fastbcd {shlex.join(words)}"
        say(
            f"\ninterrupted; finished steps are saved, and the same command resumes:\n  {again}"
        )
        return 130
    except Exception as error:
        if ranks.world() > 1 or "FASTBCD_TRACEBACK" in os.environ:
            raise
        text = " ".join(str(error).split())
        if not isinstance(error, ValueError | OSError | ImportError):
            text = f"{type(error).__name__}: {text} (FASTBCD_TRACEBACK=1 shows where)"
        print(f"fastbcd {options.command}: {text}", file=sys.stderr)
        return 2
    return status or 0
