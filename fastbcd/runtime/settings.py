"""Settings: frozen dataclasses whose fields are the only definition of what can be set.

    @dataclass(frozen=True, kw_only=True)
    class Search(Settings):
        rt: int = setting(50, "hypotheses that a step tries at most", least=1)

Checks, the signature and help of functions, options of the command line and config.json are made
from the fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fastbcd.runtime.validate import check_choice, check_number, check_whole

Function = TypeVar("Function", bound=Callable[..., Any])


ALIASES = {"learning_rate": "lr"}  # what other libraries call a setting

# What kinds of values are called in errors.
WORDS = {
    Callable: "a callable",
    str: "a text",
    int: "a whole number",
    bool: "True or False",
}


def setting(
    default: Any,
    help: str,
    *,
    least: float = -math.inf,
    above: float | None = None,
    most: float = math.inf,
    finite: bool = True,
    choices: Iterable[Any] = (),
    recorded: bool = True,
) -> Any:
    """A field of `Settings`.

    Args:
        default: the value if none is passed. A type that allows None means "not set".
        help: a phrase that completes "name: ...", for docstrings and the command line.
        least, most: bounds of a number, both allowed. above: a lower bound that is not allowed.
        finite: whether infinity is refused.
        choices: the values that are allowed.
        recorded: whether the value can change an outcome, so that config.json has it.
    """
    metadata = {
        "help": help, "least": least, "above": above, "most": most, "finite": finite,
        "choices": tuple(choices), "recorded": recorded,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Derive from it, and give every field by `setting`. Values are checked when one is made.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Steps(Settings):
    ...     rt: int = setting(50, "hypotheses that a step tries at most", least=1)
    >>> Steps().describe()
    {'rt': 50}
    >>> Steps(rt=0)
    Traceback (most recent call last):
    ValueError: rt=0; it must be a whole number, 1 or more
    """

    def __init_subclass__(cls) -> None:
        """The docstring of a subclass ends with its settings."""
        fields = {
            name: field
            for name, field in vars(cls).items()
            if isinstance(field, dataclasses.Field)
        }
        cls.__doc__ = inspect.cleandoc(cls.__doc__ or "") + _help(fields)

    def __post_init__(self) -> None:
        kinds = kinds_of(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_int = int not in kinds[field.name] or isinstance(value, int)
            if not is_int and hasattr(value, "item"):
                value = value.item()  # a number of NumPy or torch
                object.__setattr__(self, field.name, value)
            _check(field.name, value, kinds[field.name], field.metadata)

    def describe(self) -> dict[str, Any]:
        """What config.json records: all settings that can change the outcome."""
        return {
            field.name: described(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.metadata["recorded"]
        }


def kinds_of(cls: type[Settings]) -> dict[str, frozenset[Any]]:
    """For each field, the types that its annotation names."""
    kinds = {}
    for name, hint in typing.get_type_hints(cls).items():
        members = [hint]
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            members = list(typing.get_args(hint))
        kinds[name] = frozenset(typing.get_origin(kind) or kind for kind in members)
    return kinds


def fields_in(cls: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that are fields of the class."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in values.items() if name in names}


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, by name; none of another object."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return {}


def check_names(who: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse arguments of the function `who` that are none of the known ones."""
    for name in names:
        if name not in known:
            name_here = ALIASES.get(name, name)
            near = difflib.get_close_matches(name_here, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{who} has no argument {name!r}{hint}")


def with_settings(
    *classes: type[Any], without: Iterable[str] = ()
) -> Callable[[Function], Function]:
    """Give a function with `**settings` the signature and the help of these settings.

    Of a name that occurs twice the first counts. without: names that are left out. The function
    refuses keywords that are none of these.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Steps(Settings):
    ...     rt: int = setting(50, "hypotheses that a step tries at most", least=1)
    >>> @with_settings(Steps)
    ... def search(net, **settings):
    ...     "Search."
    >>> search(None, tr=3)
    Traceback (most recent call last):
    TypeError: search has no argument 'tr'; did you mean 'rt'?
    >>> inspect.signature(search)
    <Signature (net, *, rt: 'int' = 50)>
    >>> print(search.__doc__)
    Search.
    <BLANKLINE>
    Settings:
        rt: hypotheses that a step tries at most (50)
    """

    fields: dict[str, Any] = {}
    for cls in classes:
        for field in dataclasses.fields(cls):
            fields.setdefault(field.name, field)

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = dict(signature.parameters)
        parameters.popitem()  # **settings
        added = {n: f for n, f in fields.items() if n not in (*parameters, *without)}
        for name, field in added.items():
            parameters[name] = inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=field.type,
            )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            check_names(function.__name__, kwargs, parameters)
            return function(*args, **kwargs)

        changed: Any = call
        changed.__signature__ = signature.replace(parameters=list(parameters.values()))
        changed.__doc__ = inspect.cleandoc(function.__doc__ or "") + _help(added)
        return changed

    return decorate


def described(value: Any) -> Any:
    """A value as JSON: objects by their describe(), functions by their name.

    >>> described(1.5), described(math.sqrt)
    (1.5, 'function math.sqrt')
    """
    if callable(getattr(value, "describe", None)):
        return value.describe()
    if isinstance(getattr(value, "name", None), str):
        return value.name
    if callable(value):
        kind = type(value).__qualname__
        name = getattr(value, "__qualname__", kind)
        return f"function {getattr(value, '__module__', '?')}.{name}"
    return value


def _help(fields: Mapping[str, dataclasses.Field[Any]]) -> str:
    """A section of a docstring with the settings, their meaning and their defaults."""
    lines = ["", "", "Settings:"]
    for name, field in fields.items():
        text = f"{name}: {field.metadata['help']} ({described(field.default)})"
        lines += textwrap.wrap(
            text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8
        )
    return "\n".join(lines)


def _check(
    name: str, value: Any, kinds: frozenset[Any], limits: Mapping[str, Any]
) -> None:
    """Refuse a value that is of no kind that the field takes, or outside its limits."""
    others = kinds - {int, float}
    if limits["choices"] and isinstance(value, str):
        check_choice(name, value, limits["choices"])
    elif isinstance(value, tuple(others)):
        return
    elif float in kinds:
        strictly = limits["above"] is not None
        least = limits["above"] if strictly else limits["least"]
        if limits["finite"] or value not in (-math.inf, math.inf):
            check_number(name, value, least, strictly, limits["most"])
    elif int in kinds:
        check_whole(name, value, limits["least"], most=limits["most"])
    else:
        words = [WORDS.get(kind, kind.__name__) for kind in others - {type(None)}]
        raise TypeError(f"{name}={value!r}; it must be {' or '.join(sorted(words))}")
