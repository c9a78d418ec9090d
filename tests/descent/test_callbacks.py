"""callbacks=: what is called with the records of a run, and when."""

from __future__ import annotations

import dataclasses
import importlib
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastbcd


def data():
    torch.manual_seed(0)
    return torch.randn(50, 1, 2, 2), torch.arange(50) % 3


def masked_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), fastbcd.MaskedReLU(6), nn.Linear(6, 3))


def test_steps_and_the_epochs_of_a_fine_tune_arrive_in_order() -> None:
    records: list = []
    run = fastbcd.bcd(
        masked_net(), data(), 2, drc=2, rt=2, callbacks=[records.append],
        finetune=fastbcd.Finetune(epochs=2, padding=0),
    )  # fmt: skip
    kinds = [type(record).__name__ for record in records]
    assert kinds == ["Epoch", "Epoch", "Step"] * 2
    assert [record for record in records if isinstance(record, fastbcd.Step)] == run.history
    assert [(e.number, e.phase) for e in records[:2]] == [(1, "finetune"), (2, "finetune")]
    assert records[1].loss == run.history[0].train_loss
    assert records[1].lr < records[0].lr


def test_every_callback_of_linearize_gets_every_step_once_it_is_saved(tmp_path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    saved: list = []
    numbers: list = []
    run = fastbcd.linearize(
        model, data(), 2, epochs=3, padding=0, progress=False, run_dir=tmp_path,
        callbacks=[
            lambda step: saved.append(len(fastbcd.load_run(tmp_path).history)),
            lambda step: numbers.append(step.number),
        ],
    )  # fmt: skip
    assert saved == numbers == [step.number for step in run.history]


def test_what_steps_that_only_train_record() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    run = fastbcd.linearize(model, data(), 2, epochs=3, padding=0, progress=False)
    last = run.history[-1]
    assert (last.drc, last.before, last.after, last.tried, last.returned) == (0, 2, 2, 0, 0)
    assert last.accepted
    assert (last.drops, last.images, last.interval, last.cost) == ({}, None, None, None)
    assert (last.chosen_accuracy, last.chosen_loss) == (last.base_accuracy, last.base_loss)
    assert last.seconds.keys() == {"score", "finetune", "test"}
    assert last.number == len(run.history)
    assert all(step.seconds.keys() >= {"propose", "score"} for step in run.history if step.drc)


def test_a_failing_callback_stops_the_run_after_its_step(tmp_path) -> None:
    def fail(record) -> None:
        raise ValueError("no space in the log")

    arguments = {"drc": 2, "rt": 2, "finetune": None, "run_dir": tmp_path}
    net = masked_net()
    with pytest.raises(ValueError, match="no space in the log"):
        fastbcd.bcd(net, data(), 2, callbacks=[fail], **arguments)
    assert fastbcd.masks(net).count() == 4
    assert len(fastbcd.bcd(masked_net(), data(), 2, **arguments).history) == 2


def test_tensorboard_as_documented(tmp_path, monkeypatch) -> None:
    """The lines of docs/training-code.md, and TensorBoard's own reader."""
    pytest.importorskip("tensorboard", reason="`make setup` installs it")
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    page = (Path(__file__).parents[2] / "docs" / "training-code.md").read_text()
    lines = re.search(r"TensorBoard:\n\n((?:    .*\n)+)", page)
    assert lines
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    names: dict[str, Any] = {"fastbcd": fastbcd, "model": model, "train": data()}
    code = textwrap.dedent(lines[1]).replace("1_000, epochs=4", "2, epochs=2, padding=0")
    exec(code, names)
    names["writer"].close()
    reader = events.EventAccumulator(str(tmp_path / "logs"))
    reader.Reload()
    logged = [(event.step, event.value) for event in reader.Scalars("train accuracy")]
    history = names["run"].history
    assert logged == [(step.number, pytest.approx(step.chosen_accuracy)) for step in history]


def test_a_run_is_a_table_and_a_figure() -> None:
    run = fastbcd.bcd(masked_net(), data(), 2, drc=2, rt=2, finetune=None, test=data())
    assert all(dataclasses.is_dataclass(step) for step in run.history)  # as pandas reads them
    for step, accuracy in zip(run.history, (80.0, 70.5), strict=True):
        step.test_accuracy = accuracy
    page = run._repr_html_()
    assert "2 of 6 ReLUs kept" in page
    assert "test accuracy, 70.50 to 80.00 %" in page
    # 4 ReLUs are to the right of 2, and 80 % above 70.5 %.
    assert re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', page) == [
        ("390.0", "30.0"),
        ("30.0", "130.0"),
    ]
    done = fastbcd.bcd(run.model, data(), 2, finetune=None)
    assert "<svg" not in done._repr_html_()


@pytest.mark.parametrize("callbacks", [print, [3], None])
def test_other_callbacks_are_refused(callbacks) -> None:
    with pytest.raises(TypeError, match=r"callbacks=.*give a list of functions"):
        fastbcd.bcd(masked_net(), data(), 2, callbacks=callbacks)
