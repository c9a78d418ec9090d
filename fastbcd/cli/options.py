"""Options: made from the parameters of functions and classes, and from their docstrings.

A parameter is an option if its value can be written as text; its help is in "Args" or "Settings" of
the docstring. An option that is not given is not in the namespace: defaults are the function's own.
"""

from __future__ import annotations

import inspect
import re
from argparse import (
    SUPPRESS,
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    Namespace,
)
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fastbcd
from fastbcd.descent.schedules import Schedule

POSITIONAL = ("runs", "source")
WITHOUT = ("relus", "poly", "line")  # the commands set these
OFF = {
    "progress": "--quiet",
    "exact": "--as-published",
}  # options that set a parameter to False
HELP = re.compile(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", re.MULTILINE)


def add_options(parser: ArgumentParser, sources: Iterable[Callable[..., Any]]) -> None:
    """Add the options of functions and classes; of a name that occurs twice the first counts.

    >>> parser = ArgumentParser()
    >>> add_options(parser, [fastbcd.Finetune])
    >>> parser.parse_args(["--lr", "0.2", "--no-flip", "--amp", "fp16"])
    Namespace(lr=0.2, flip=False, amp='fp16')
    """
    added: set[str] = set()
    for source in sources:
        about = inspect.getdoc(source) or ""
        group: Any = parser
        if added:
            group = parser.add_argument_group(about.partition(".")[0])
        for name, parameter in inspect.signature(source).parameters.items():
            words = re.findall(
                r"\w+", str(parameter.annotation)
            )  # annotations are texts
            if name not in {*added, *WITHOUT} and READERS.keys() & words:
                added.add(name)
                _add(group, name, words, _help(about, name))


def _add(group: Any, name: str, words: list[str], text: str) -> None:
    """Add the option of a parameter. words: of its annotation."""
    how: dict[str, Any] = {"default": SUPPRESS, "help": text}
    flag = "--" + name.replace("_", "-")
    known = [word for word in READERS if word in words]
    if name in POSITIONAL:
        group.add_argument(
            name, type=Path, nargs="+" if "Sequence" in words else None, help=text
        )
    elif name in OFF:
        how["help"] = f"do not {text}"
        group.add_argument(OFF[name], dest=name, action="store_false", **how)
    elif known == ["bool"]:
        group.add_argument(flag, action=BooleanOptionalAction, **how)
    else:
        if "bool" in known:  # or a text
            group.add_argument(
                f"--no-{name}", dest=name, action="store_false", default=SUPPRESS
            )
            how |= {"nargs": "?", "const": True}
        group.add_argument(flag, type=READERS[known[0]], **how)


def _help(about: str, name: str) -> str:
    """What a docstring says of a parameter, for argparse."""
    for names, text in HELP.findall(about):
        if name in names.split(", "):
            return " ".join(text.split()).replace("%", "%%")
    return ""


def call(
    function: Callable[..., Any], options: Namespace, *arguments: Any, **more: Any
) -> Any:
    """Call the function with these arguments, and with the options that are parameters of it.

    >>> call(fastbcd.Fraction, Namespace(share=0.5, seed=3), least=10)
    Fraction(share=0.5, least=10)
    """
    names = list(inspect.signature(function).parameters)[len(arguments) :]
    given = {name: value for name, value in vars(options).items() if name in names}
    return function(*arguments, **(given | more))


def drc(text: str) -> int | Schedule:
    """A number of ReLUs, a share of those that are left, or `adaptive`.

    >>> drc("100"), drc("2%"), drc("adaptive").start
    (100, Fraction(share=0.02, least=1), 100)
    """
    if text == "adaptive":
        return fastbcd.Adaptive(100)
    try:
        if text.endswith("%"):
            return fastbcd.Fraction(float(text[:-1]) / 100)
        return int(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text} is neither a number of ReLUs nor a share above 0% and up to 100%, nor the "
            f"word adaptive"
        ) from None


def budgets(text: str) -> int | list[int]:
    """A number of ReLUs, or several of them.

    >>> budgets("20000"), budgets("100000,20000")
    (20000, [100000, 20000])
    """
    numbers = [int(number) for number in text.split(",")]
    if len(numbers) > 1:
        return numbers
    return numbers[0]


# How a text is read, by a word of the annotation; of several words the first one counts.
READERS: dict[str, Callable[[str], Any]] = {
    "Schedule": drc,
    "Budget": budgets,
    "Path": Path,
    "PathLike": Path,
    "str": str,
    "float": float,
    "int": int,
    "bool": bool,
}
