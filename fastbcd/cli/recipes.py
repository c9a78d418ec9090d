"""fastbcd recipes: the paper's experiments by name, or the plan of some of them."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

from fastbcd import recipes


def main(arguments: list[str] | None = None) -> int:
    """List all recipes, those that match a pattern, or print the plan of one by name.

    >>> main(["ablation-base"])  # doctest: +ELLIPSIS
    ablation-base (Figure 5): resnet18 on cifar100, 50,000 images, 0.555 G multiply-adds each
    ...
    0
    """
    parser = argparse.ArgumentParser(
        prog="fastbcd recipes",
        description="The paper's experiments: settings, estimated cost, published test accuracy of "
        "the start (SNL or AutoReP straight to the budget) and of BCD. "
        "`fastbcd bcd --recipe NAME` runs one.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a recipe, whose plan is printed, or a pattern such as 'resnet18-tiny-*'",
    )
    options = parser.parse_args(arguments)
    try:
        print(_listing(options.names))
    except ValueError as error:
        parser.error(str(error))
    return 0


def _listing(names: list[str]) -> str:
    """The plans of recipes by name; a table of those that match patterns; all of them."""
    if not names:
        return recipes.table(recipes.RECIPES.values())
    parts = []
    for name in names:
        found = [r for r in recipes.RECIPES.values() if fnmatchcase(r.name, name)]
        if name in recipes.RECIPES or not found:
            parts.append(str(recipes.plan(recipes.get(name))))
        else:
            parts.append(recipes.table(found))
    return "\n\n".join(parts)
