"""`fastbcd autorep`: a starting point for BCD by AutoReP, with the published values as defaults."""

from __future__ import annotations

import argparse

from fastbcd.cli import options as common
from fastbcd.starts.autorep import autorep

TRAINING: common.Values = {
    "epochs": (200, ""),
    "lr": (1e-3, "first learning rate of Adam"),
    "lr_end": (1e-5, "learning rate at the end of the cosine"),
    "threshold": (0.003, "of the hysteresis"),
    "scale_x2": (1.0, "factor on the quadratic coefficient at the start"),
}


def main(arguments: list[str] | None = None) -> int:
    """Replace the ReLUs of the net of --weights by quadratics, down to --budget ReLUs."""
    parser = argparse.ArgumentParser(
        prog="fastbcd autorep",
        description="AutoReP: removed ReLUs become quadratics, trained together with the weights "
        "and the values that decide on each ReLU. Continue with `fastbcd bcd --replacement poly "
        "--weights RUN_DIR`. The same command again resumes an interrupted run.",
    )
    group = common.add_values(parser, "training", TRAINING)
    group.add_argument("--penalty", type=float,
                       help="weight of the density (the published one for the budget)")  # fmt: skip
    group.add_argument("--paper-quirks", action="store_true",
                       help="start with the quadratics of the authors' code")  # fmt: skip
    names = (*TRAINING, "penalty", "paper_quirks")
    return common.run_start(
        autorep, parser, arguments, finetune_epochs=0, settings=lambda o: common.chosen(o, names)
    )
