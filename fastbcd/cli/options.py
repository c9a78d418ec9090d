"""Options: a parser from commands.json, and arguments of functions from what was parsed."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Mapping
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

import fastbcd
from fastbcd import models, private
from fastbcd.data.sources import KNOWN
from fastbcd.descent.blocks import PROPOSALS
from fastbcd.descent.schedules import Schedule
from fastbcd.masking.activations import REPLACEMENTS
from fastbcd.private import units
from fastbcd.runtime.validate import check_whole
from fastbcd.scoring.engine import ENGINES, PRECISIONS
from fastbcd.training.settings import OPTIMIZERS

TABLE = json.loads((resources.files("fastbcd.cli") / "commands.json").read_text("utf-8"))
CHOICES: dict[str, tuple[str, ...]] = {
    "architectures": tuple(models.NAMES), "data": tuple(KNOWN),
    "downloadable": ("cifar10", "cifar100"),  # through torchvision
    "formats": ("plain", "snl", "autorep", "relupruner"), "engines": ENGINES,
    "optimizers": OPTIMIZERS, "proposals": tuple(PROPOSALS), "protocols": tuple(private.PROTOCOLS),
    "replacements": tuple(REPLACEMENTS), "resume": ("auto", "must", "never"),
    "when": ("every_step", "on_reject"),
    "precisions": PRECISIONS,
    "temperature": (str(fastbcd.Saliency().temperature),),
}  # fmt: skip


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of a command's arguments.

    >>> parser_of("train").parse_args(["--lr", "0.2"]).lr
    0.2
    """
    about = TABLE["commands"][command]
    parser = argparse.ArgumentParser(prog=f"fastbcd {command}", description=about["description"])
    known: dict[str, Any] = {"device": "cuda" if torch.cuda.is_available() else "cpu"}
    for name in about.get("functions", ()):
        parameters = inspect.signature(attrgetter(name)(fastbcd)).parameters.values()
        known |= {p.name: p.default for p in parameters if p.default is not p.empty}
    changed = about.get("defaults", {})
    for title, options in about["options"].items():
        options = TABLE["shared"][title] if options == "shared" else options
        _add(parser.add_argument_group(title), options, {**known, **changed})
    parser.set_defaults(**changed)
    return parser


def _add(group: Any, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    words = {name: ", ".join(choices) for name, choices in CHOICES.items()}
    for flag, how in options.items():
        if flag == "one of":
            _add(group.add_mutually_exclusive_group(), how, known)
            continue
        how = {"help": how} if isinstance(how, str) else dict(how)
        text, name = how["help"].format(**words), how.get("dest", flag[2:].replace("-", "_"))
        default = how.setdefault("default", known.get(name))
        if how.get("action") == "on or off":
            how["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, bool):
            how["action"] = "store_false" if default else "store_true"
        elif default is not None:
            how.setdefault("type", type(default).__name__)
            text += "" if text.endswith(")") else " (%(default)s)"
        how |= {key: table[how[key]] for key, table in TABLES.items() if key in how}
        group.add_argument(flag, **{**how, "help": text.strip()})


def call(function: Callable[..., Any], options: argparse.Namespace, **given: Any) -> Any:
    """Call the function with `given` and with the options that are parameters of it.

    >>> call(fastbcd.Fraction, argparse.Namespace(share=0.5, seed=3), least=10)
    Fraction(share=0.5, least=10)
    """
    wanted = inspect.signature(function).parameters
    return function(**{k: v for k, v in vars(options).items() if k in wanted} | given)


# ------------------------------------------------------------------------------- types


def drc(text: str) -> int | Schedule:
    """A number of ReLUs, a share of those that are left, or `adaptive`.

    >>> [drc(text) for text in ("100", "2%", "adaptive")]
    [100, Fraction(share=0.02, least=1), Adaptive(start=100, grow=1.25, shrink=0.5, least=1,
    most=None)]
    """
    if text == "adaptive":
        return fastbcd.Adaptive(100)
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
    >>> temperature("2")
    2.0
    """
    return fastbcd.Saliency(float(text)).temperature


def unit(read: Callable[[str], float]) -> Callable[[str], float]:
    """A type for argparse that prints the error of `read`.

    >>> unit(units.in_seconds)("40ms")
    0.04
    """

    def reader(text: str) -> float:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reader


def kept(read: Callable[[str], float]) -> Callable[[str], str]:
    """The same, and the argument stays a text."""

    def checked(text: str) -> str:
        unit(read)(text)
        return text

    return checked


TABLES: dict[str, Mapping[str, Any]] = {  # what the names in commands.json mean
    "type": {"int": int, "float": float, "str": str, "list": str, "path": Path, "drc": drc,
             "temperature": temperature, "bandwidth": kept(units.bits_per_second),
             "rtt": kept(units.round_trip),
             "time": unit(units.in_seconds), "size": unit(units.in_bytes)},
    "choices": CHOICES,
}  # fmt: skip
