"""Several budgets on one way down: each run starts where the last one ended.

python examples/several_budgets.py
"""

from __future__ import annotations

from collections.abc import Sequence

import fastbcd
from fastbcd.cli.demo import trained_resnet


def main(
    images: int = 4_000,
    budgets: Sequence[int] = (15_000, 8_000, 3_000),
    epochs: int = 18,
) -> list[fastbcd.Run]:
    """One run per budget, and a page that compares them."""
    train = fastbcd.load("fashion-mnist-mini", "train").first(images)
    test = fastbcd.load("fashion-mnist-mini", "test").first(images)
    runs = fastbcd.linearize(
        trained_resnet(),
        train,
        budgets,
        epochs=epochs,
        test=test,
        run_dir="runs/budgets",
        padding=2,
    )
    for run in runs:
        accuracy = fastbcd.accuracy(run.model, test)
        print(f"{run.masks.count():,} ReLUs: {accuracy:.2f} %")
    folders = [f"runs/budgets/{budget}" for budget in budgets]
    print(fastbcd.report.write(folders, "runs/budgets/report"))
    return runs


if __name__ == "__main__":
    main()
