"""`fastbcd recipes`: the paper's experiments by name, or the plans of some of them."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

from fastbcd import recipes


def main(arguments: list[str] | None = None) -> int:
    """List all recipes or those that match a pattern, or print the plan of one.

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
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="a recipe, whose plan is printed, or a pattern such as "
                        "'resnet18-tiny-*'")  # fmt: skip
    options = parser.parse_args(arguments)
    parts = []
    try:
        for name in options.names or ["*"]:
            found = [r for r in recipes.RECIPES.values() if fnmatchcase(r.name, name)]
            exact = name in recipes.RECIPES or not found
            parts.append(str(recipes.plan(recipes.get(name))) if exact else recipes.table(found))
    except ValueError as error:
        parser.error(str(error))
    print("\n\n".join(parts))
    return 0
