"""Fixtures: run directories that several rooms read, made once per session."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import fastbcd
from helpers.run_cases import small_net, small_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "whole"
    small_run(place)
    return place


@pytest.fixture(scope="session")
def cut_short(tmp_path_factory) -> Path:
    """The same run, interrupted in its third step of five."""
    place = tmp_path_factory.mktemp("runs") / "cut"

    def train(net: torch.nn.Module, step: fastbcd.Step) -> None:
        if step.number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_run(place, finetune=train)
    return place


@pytest.fixture(scope="session")
def stages(tmp_path_factory) -> Path:
    """Dense training, SNL and BCD in one folder, as benchmarks/paper leaves them."""
    place = tmp_path_factory.mktemp("runs") / "stages"
    data, net = fastbcd.load("fashion-mnist-mini").first(48), small_net()
    test = data.first(20)
    fastbcd.train(net, data, epochs=2, test=test, run_dir=place / "1-dense", batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the budget is not reached in 3 epochs
        fastbcd.snl(
            net, data, 60, test=test, max_epochs=3, lambda0=0.1, lr=0.05, batch_size=16,
            finetune=fastbcd.Finetune(epochs=1), run_dir=place / "2-snl",
        )  # fmt: skip
    fastbcd.bcd(
        net, data, 20, drc=20, rt=2, finetune=None, test=test, run_dir=place / "3-bcd"
    )  # fmt: skip
    return place
