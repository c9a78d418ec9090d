"""`fastbcd snl`: a starting point for BCD by SNL, with the published values as defaults."""

from __future__ import annotations

import argparse

from fastbcd.cli import options as common
from fastbcd.starts.snl import snl

TRAINING: common.Values = {
    "lr": (1e-3, "learning rate of Adam"),
    "lambda0": (1e-5, "first weight of the penalty"),
    "kappa": (1.1, "its growth"),
    "threshold": (1e-2, "a mask value below it removes the ReLU"),
    "max_epochs": (2000, "at most"),
}


def main(arguments: list[str] | None = None) -> int:
    """Linearise the net of --weights down to --budget ReLUs."""
    parser = argparse.ArgumentParser(
        prog="fastbcd snl",
        description="Selective Network Linearization: real-valued masks are trained with the "
        "weights under a growing penalty, then rounded to bits, and the net is fine-tuned. The "
        "same command again resumes an interrupted run.",
    )
    group = common.add_values(parser, "mask training", TRAINING)
    group.add_argument("--as-published", action="store_true",
                       help="keep what is above the threshold, usually fewer than "
                       "--budget")  # fmt: skip
    return common.run_start(
        snl, parser, arguments, finetune_epochs=100,
        settings=lambda o: {**common.chosen(o, TRAINING), "exact": not o.as_published},
    )  # fmt: skip
