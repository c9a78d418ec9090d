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
    epochs: int = 6,
) -> list[fastbcd.Run]:
    """One run per budget, and a page that compares them."""
    train = fastbcd.load("fashion-mnist-mini", "train").first(images)
    test = fastbcd.load("fashion-mnist-mini", "test").first(images)
    dense = trained_resnet()
    runs: list[fastbcd.Run] = []
    for budget in budgets:
        run = fastbcd.linearize(
            dense,
            train,
            budget,
            epochs=epochs,
            test=test,
            start=runs[-1] if runs else None,
            run_dir=f"runs/{budget}",
            padding=2,
        )
        print(f"{budget:,} ReLUs: {fastbcd.accuracy(run.model, test):.2f} %")
        runs.append(run)
    folders = [f"runs/{budget}" for budget in budgets]
    print(fastbcd.report.write(folders, "runs/report"))
    return runs


if __name__ == "__main__":
    main()
