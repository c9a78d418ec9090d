"""callbacks=: what is called with the records of a run, and when."""

from __future__ import annotations

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


def test_a_failing_callback_stops_the_run_after_its_step(tmp_path) -> None:
    def fail(record) -> None:
        raise ValueError("no space in the log")

    arguments = {"drc": 2, "rt": 2, "finetune": None, "run_dir": tmp_path}
    net = masked_net()
    with pytest.raises(ValueError, match="no space in the log"):
        fastbcd.bcd(net, data(), 2, callbacks=[fail], **arguments)
    assert fastbcd.masks(net).count() == 4
    assert len(fastbcd.bcd(masked_net(), data(), 2, **arguments).history) == 2


@pytest.mark.parametrize("callbacks", [print, [3], None])
def test_other_callbacks_are_refused(callbacks) -> None:
    with pytest.raises(TypeError, match=r"callbacks=.*give a list of functions"):
        fastbcd.bcd(masked_net(), data(), 2, callbacks=callbacks)
