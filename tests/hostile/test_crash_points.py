"""A fault before, inside and after every file operation of a run: nothing is lost or different."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import fastbcd
from fastbcd.runs.config import Config
from fastbcd.runs.directory import RunDirectory, State
from fastbcd.runs.step import encode
from helpers.faults import WHEN, Ended, Faults
from helpers.run_cases import contents, nudge, small_net, small_run

STEPS = 3
SHORT = {"budget": 38, "finetune": nudge}


@pytest.fixture(scope="module")
def config() -> Config:
    data = fastbcd.load("fashion-mnist-mini").first(4)
    return Config.of("bcd", {"budget": 0, "drc": 1}, small_net(), data=data, test=None)


def tiny_run(folder: Path, config: Config) -> None:
    """The files of a run of three steps; a step's tensor depends on the one before."""
    with closing(RunDirectory(folder, config, "auto")) as run:
        state = run.newest()
        if state is None:
            state = State({"w": torch.arange(4.0)}, {}, [], done=False)
            run.write(state)
        for number in range(len(state.history) + 1, STEPS + 1):
            w = state.tensors["w"] * 3 + number
            record = fastbcd.Step(
                number=number, before=98 - number, after=97 - number, drc=1, tried=1, chosen=0,
                accepted=True, drops={0: 0.5}, base_accuracy=50.0, base_loss=1.0,
                chosen_accuracy=49.5, chosen_loss=float(w.sum()), engine="stacked",
                sites=[97 - number],
            )  # fmt: skip
            history = [*state.history, encode(record)]
            state = State({"w": w}, {}, history, done=number == STEPS)
            run.write(state)


def points(folder: Path, config: Config, when: str, kind: str) -> Iterator[Path]:
    """A run directory for each operation at which a run had a fault."""
    for at in count(1):
        run_dir = folder / f"{at}"
        faults = Faults(at, when, kind)
        try:
            with faults.active():
                tiny_run(run_dir, config)
        except (Ended, OSError):
            pass
        if faults.count < at:
            return
        yield run_dir


def check_finished(run_dir: Path, expected: Any) -> None:
    assert contents(run_dir) == expected, run_dir
    names = {p.name for p in run_dir.iterdir()}
    assert not [n for n in names if n.endswith(".tmp")]


@pytest.mark.parametrize("kind", ["end", "error"])
@pytest.mark.parametrize("when", WHEN)
def test_a_fault_at_every_operation(when, kind, config, tmp_path) -> None:
    tiny_run(tmp_path / "whole", config)
    expected = contents(tmp_path / "whole")
    number = 0
    for run_dir in points(tmp_path / "runs", config, when, kind):
        tiny_run(run_dir, config)
        check_finished(run_dir, expected)
        number += 1
    assert number > 25


@pytest.mark.parametrize("when", WHEN)
def test_a_second_fault_while_a_run_is_resumed(when, config, tmp_path) -> None:
    """A seeded choice of pairs of operations."""
    tiny_run(tmp_path / "whole", config)
    expected, rng = contents(tmp_path / "whole"), random.Random(11)
    for first in points(tmp_path / "runs", config, rng.choice(WHEN), "end"):
        at = rng.randrange(1, 12)
        faults = Faults(at, when, rng.choice(["end", "error"]))
        try:
            with faults.active():
                tiny_run(first, config)
        except (Ended, OSError):
            pass
        tiny_run(first, config)
        check_finished(first, expected)


@pytest.mark.long
def test_pairs_of_faults_for_a_minute(config, tmp_path) -> None:
    tiny_run(tmp_path / "whole", config)
    expected, rng, number = contents(tmp_path / "whole"), random.Random(13), 0
    begun = [
        list(points(tmp_path / f"{when}-{kind}", config, when, kind))
        for when in WHEN
        for kind in ("end", "error")
    ]
    end = time.monotonic() + 60
    while number == 0 or time.monotonic() < end:
        first, again = rng.choice(rng.choice(begun)), tmp_path / "again"
        if first.exists():
            shutil.copytree(first, again)
        try:
            with Faults(rng.randrange(1, 30), rng.choice(WHEN), "end").active():
                tiny_run(again, config)
        except Ended:
            pass
        tiny_run(again, config)
        check_finished(again, expected)
        shutil.rmtree(again)
        number += 1


def faulty_bcd(run_dir: Path, at: int, when: str, expected: Any) -> bool:
    """BCD with a fault and then again; False if it has fewer operations."""
    faults = Faults(at, when, "end")
    try:
        with faults.active():
            small_run(run_dir, **SHORT)
    except Ended:
        pass
    small_run(run_dir, **SHORT)
    check_finished(run_dir, expected)
    assert fastbcd.load_run(run_dir).done
    return faults.count >= at


def test_faults_in_bcd(tmp_path) -> None:
    """A seeded choice of operations of a run with scoring and training."""
    small_run(tmp_path / "whole", **SHORT)
    expected, rng = contents(tmp_path / "whole"), random.Random(3)
    for i, at in enumerate(rng.sample(range(3, 30), 4)):
        assert faulty_bcd(tmp_path / f"{i}", at, WHEN[i % 3], expected)


@pytest.mark.long
@pytest.mark.parametrize("when", WHEN)
def test_a_fault_at_every_operation_of_bcd(when, tmp_path) -> None:
    small_run(tmp_path / "whole", **SHORT)
    expected = contents(tmp_path / "whole")
    for at in count(1):
        if not faulty_bcd(tmp_path / f"{at}", at, when, expected):
            assert at > 30
            return
