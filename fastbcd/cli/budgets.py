"""The budget that options name: a number of ReLUs, or a cost in private inference."""

from __future__ import annotations

import argparse

import fastbcd
from fastbcd.cli.options import call

QUANTITIES = {"seconds": "s", "bytes": "B", "rounds": "rounds"}
COSTS = "--seconds, --bytes or --rounds"


def targeted(options: argparse.Namespace) -> bool:
    """Whether the budget is a cost."""
    return any(getattr(options, quantity, None) is not None for quantity in QUANTITIES)


def given(options: argparse.Namespace) -> bool:
    """Whether there is a budget."""
    return options.budget is not None or targeted(options)


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse no budget, and options of a cost without one."""
    if not given(options):
        parser.error(f"give --budget, {COSTS}")
    check_connection(options, parser)


def check_connection(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse a protocol or a connection without a cost."""
    for name in ("protocol", "bandwidth", "rtt"):
        if getattr(options, name) != parser.get_default(name) and not targeted(options):
            parser.error(f"--{name} goes with {COSTS} only; leave it out")


def budget_of(options: argparse.Namespace) -> int | fastbcd.private.Target:
    """The number of ReLUs, or the target, with that number as its bound.

    >>> budget_of(argparse.Namespace(budget=5, seconds=0.5, protocol="crypten"))
    Target(seconds=0.5, protocol='crypten', bandwidth='1Gbit', rtt='1ms', relus=5)
    """
    if targeted(options):
        return call(fastbcd.private.Target, options, relus=options.budget)
    return options.budget


def parts(options: argparse.Namespace) -> list[str]:
    """The budget in the name of a run directory.

    >>> parts(argparse.Namespace(budget=5, seconds=0.5))
    ['5', '0.5s']
    """
    found = {unit: getattr(options, name, None) for name, unit in QUANTITIES.items()}
    found = {"": getattr(options, "budget", None), **found}
    return [f"{value:.15g}{unit}" for unit, value in found.items() if value is not None]
