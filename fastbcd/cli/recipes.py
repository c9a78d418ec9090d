"""`fastbcd recipes`: the paper's experiments by name, or the plans of some of them."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

from fastbcd import recipes


def work(options: argparse.Namespace) -> None:
    """List all recipes or those that match a pattern, or print the plan of one."""
    parts = []
    for name in options.names or ["*"]:
        found = [r for r in recipes.RECIPES.values() if fnmatchcase(r.name, name)]
        exact = name in recipes.RECIPES or not found
        parts.append(str(recipes.plan(recipes.get(name))) if exact else recipes.table(found))
    print("\n\n".join(parts))
