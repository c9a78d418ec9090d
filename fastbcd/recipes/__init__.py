"""Every experiment of the paper by name, what it takes to run it, and what was published.

recipe = fastbcd.recipes.get("resnet18-cifar100-15k")
print(fastbcd.recipes.plan(recipe))         # steps, epochs, scoring passes, PFLOP
"""

from fastbcd.recipes.recipe import (
    DATA,
    RECIPES,
    DataShape,
    Plan,
    Recipe,
    get,
    multiply_adds,
    plan,
    table,
)

__all__ = [
    "DATA",
    "RECIPES",
    "DataShape",
    "Plan",
    "Recipe",
    "get",
    "multiply_adds",
    "plan",
    "table",
]
