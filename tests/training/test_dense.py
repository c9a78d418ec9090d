"""train: SGD with two drops of the learning rate, records, resuming, bad input."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import fastbcd
from fastbcd.training.loop import Session
from helpers.nets import make, thinned
from helpers.start_cases import Other, stopped_at
from helpers.train_cases import assert_same, pair, weights

QUICK = {"epochs": 4, "lr": 0.05, "batch_size": 16, "padding": 1}


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_equals_a_plain_loop(name) -> None:
    net, data = thinned(make(name)), pair()
    plain = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    rates = []
    for epoch in range(4):
        rates.append(schedule.get_last_lr()[0])
        batches = data.train_batches(16, seed=2, step=0, epoch=epoch, padding=1)
        for x, labels, _, _ in batches:
            optimizer.zero_grad()
            F.cross_entropy(plain(x), labels).backward()
            optimizer.step()
        schedule.step()
    trained = fastbcd.train(net, data, seed=2, test=pair(20), **QUICK)
    assert trained.model is net
    assert [r.lr for r in trained.history] == pytest.approx(rates)
    assert all(0 <= r.test_accuracy <= 100 for r in trained.history)
    for key, value in weights(net).items():
        torch.testing.assert_close(value, weights(plain)[key], rtol=1e-3, atol=1e-4)
    assert not net.training


@pytest.mark.parametrize("epoch", [0, 2, 3])
def test_an_interrupted_run_resumes_to_the_same_result(tmp_path, monkeypatch, epoch) -> None:
    straight = fastbcd.train(make("resnet"), pair(), **QUICK)
    net = make("resnet")
    with monkeypatch.context() as patch:
        patch.setattr(Session, "epoch", stopped_at(epoch))
        with pytest.raises(KeyboardInterrupt):
            fastbcd.train(net, pair(), run_dir=tmp_path, **QUICK)
    resumed = fastbcd.train(make("resnet"), pair(), run_dir=tmp_path, **QUICK)
    assert_same(weights(straight.model), weights(resumed.model))
    assert [r.loss for r in straight.history] == [r.loss for r in resumed.history]
    again = fastbcd.train(make("resnet"), pair(), run_dir=tmp_path, **QUICK)
    assert_same(weights(straight.model), weights(again.model))
    with pytest.raises(ValueError, match=r"lr is 0\.05 there and 0\.1 now"):
        fastbcd.train(net, pair(), run_dir=tmp_path, **{**QUICK, "lr": 0.1})


def test_after_an_error_the_net_has_the_weights_of_the_last_finished_epoch(monkeypatch) -> None:
    net, two = make("mlp"), make("mlp")
    with monkeypatch.context() as patch:
        patch.setattr(Session, "epoch", stopped_at(2))
        with pytest.raises(KeyboardInterrupt):
            fastbcd.train(net, pair(), **QUICK)
        patch.setattr("fastbcd.training.dense.MILESTONES", (1.0, 1.0))
        fastbcd.train(two, pair(), **{**QUICK, "epochs": 2})
    assert_same(weights(net), weights(two))


def test_progress_is_a_line_for_each_epoch(capsys) -> None:
    for progress in (False, True):
        fastbcd.train(make("mlp"), pair(), **{**QUICK, "epochs": 2}, progress=progress)
        said = capsys.readouterr().out
        assert [f"epoch {number}: lr" in said for number in (1, 2)] == [progress] * 2


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"epochs": -1}, ValueError, "epochs=-1"),
        ({"lr": math.nan}, ValueError, "lr=nan"),
        ({"net": Other()}, ValueError, "no parameter to train"),
        ({"test": (torch.zeros(2, 3, 8, 8), torch.tensor([0, 9]))}, ValueError, "label 9"),
        ({"resume": "maybe"}, ValueError, "resume='maybe'"),
    ],
)
def test_bad_input(change, error, words) -> None:
    with pytest.raises(error, match=words):
        fastbcd.train(**{"net": make("mlp"), "data": pair(), **QUICK, **change})
