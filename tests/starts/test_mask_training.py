"""The stages of a start: a run that is killed goes on, ranks train as one, the fine-tune."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastbcd
from fastbcd.starts.snl import snl
from fastbcd.training.finetune import Finetuner
from fastbcd.training.settings import Finetune
from fastbcd.training.trainer import Trainer
from helpers.nets import make, thinned
from helpers.start_cases import QUICK, data, same, state, stopped_at

# --------------------------------------------------------------------------------- resuming

KILLED = """
import os, sys, signal
sys.path.insert(0, {tests!r})
from helpers.nets import make
from helpers.start_cases import QUICK, data
from fastbcd import snl
from fastbcd.runs.directory import RunDirectory
whole = RunDirectory._save
def save(self, step, tensors, record):
    answer = whole(self, step, tensors, record)
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer
RunDirectory._save = save
snl(make("resnet"), data(), 250, run_dir={folder!r}, **QUICK)
"""


def test_a_killed_run_goes_on_to_the_same_result(tmp_path) -> None:
    straight = snl(make("resnet"), data(), 250, **QUICK)
    assert len(straight.history) > 4
    code = KILLED.format(tests=str(Path(__file__).parents[1]), step=3, folder=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    resumed = snl(make("resnet"), data(), 250, run_dir=tmp_path / "run", **QUICK)
    assert same(state(resumed.model), state(straight.model))
    keys = ("count", "lambda", "loss", "iou", "decrease")
    assert [[r[k] for k in keys] for r in resumed.history] == [
        [r[k] for k in keys] for r in straight.history
    ]
    assert resumed.accuracy == straight.accuracy
    assert resumed.overlaps == straight.overlaps
    # Done: the same again, from any weights of this net, without training.
    again = snl(thinned(make("resnet"), 0.99), data(), 250, run_dir=tmp_path / "run", **QUICK)
    assert same(state(again.model), state(straight.model))
    assert again.accuracy == straight.accuracy


def test_the_default_teacher_outlives_an_interruption(tmp_path, monkeypatch) -> None:
    """It is the net as the run began, whatever weights the net has when the run goes on."""
    straight = snl(make("resnet"), data(), 250, **QUICK)
    net = make("resnet")
    given = state(net)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "epoch", stopped_at(2))
        with pytest.raises(KeyboardInterrupt):
            snl(net, data(), 250, run_dir=tmp_path, **QUICK)
    assert same(state(net), given)
    assert all(p.is_contiguous() for p in net.parameters())
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
    assert same(
        state(snl(net, data(), 250, run_dir=tmp_path, **QUICK).model), state(straight.model)
    )


def test_another_run_in_the_directory_is_refused(tmp_path) -> None:
    snl(make("mlp"), data(), 40, run_dir=tmp_path, **QUICK)
    with pytest.raises(ValueError, match=r"another run: settings\.budget is 40 there and 30 now"):
        snl(make("mlp"), data(), 30, run_dir=tmp_path, **QUICK)


# ------------------------------------------------------------------------------------ ranks

RANKS = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r} + "/starts")
from helpers import rank_cases
import test_mask_training
folder = Path({folder!r})
work = test_mask_training.on_a_rank
print(json.dumps([rank_cases.on_ranks(work, folder, world) for world in (2, 1)]))
"""


def on_a_rank(folder: Path) -> dict:
    """What one rank of a run finds; the net has no batch norm, so that its shares do not matter."""
    world = fastbcd.runtime.ranks.world()
    start = snl(make("mlp"), data(61), 30, run_dir=folder / f"snl{world}", **QUICK)
    weights = state(start.model)
    return {
        "digest": fastbcd.runtime.ranks.digest(weights).hex(),
        "counts": [r["count"] for r in start.history],
        "kept": start.masks.count(),
        "weights": weights["5.weight"].flatten().tolist(),
        "accuracy": start.accuracy,
    }


def test_two_ranks_train_as_one(tmp_path) -> None:
    code = RANKS.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (first, second), (alone,) = json.loads(done.stdout.splitlines()[-1])
    assert "failed" not in first, first
    assert first == second
    assert first["counts"] == alone["counts"]
    assert first["kept"] == alone["kept"] == 30
    assert first["weights"] == pytest.approx(alone["weights"], rel=1e-3, abs=1e-4)


# ---------------------------------------------------------------------------- the fine-tune


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_fine_tune_is_finetuners(optimizer) -> None:
    """An epoch at a time it does what Finetuner.run does in one go."""
    settings = Finetune(epochs=3, lr=0.01, padding=1, optimizer=optimizer, batch_size=32)
    net, train = thinned(make("resnet")), data()
    teacher, other = copy.deepcopy(net), copy.deepcopy(net)
    count = fastbcd.masks(net).count()
    start = snl(net, train, count, finetune=settings, teacher=teacher)
    Finetuner(other, train, settings, teacher).run(1)
    assert [r["epoch"] for r in start.finetune] == [0, 1, 2]
    noise = ("0.bias", "running_mean") if optimizer == "adam" else ()
    for key, value in state(other).items():
        if not key.endswith(noise):
            torch.testing.assert_close(state(net)[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_interrupted_fine_tune_goes_on(tmp_path, monkeypatch, optimizer) -> None:
    tune = Finetune(epochs=4, lr=0.01, padding=1, optimizer=optimizer, batch_size=32)
    settings = {**QUICK, "finetune": tune}
    straight = snl(make("resnet"), data(), 700, **settings)
    for epoch in (0, 2):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "epoch", stopped_at(epoch, step=1))
            with pytest.raises(KeyboardInterrupt):
                snl(make("resnet"), data(), 700, run_dir=tmp_path, **settings)
    resumed = snl(make("resnet"), data(), 700, run_dir=tmp_path, **settings)
    assert same(state(resumed.model), state(straight.model))
    assert resumed.accuracy == straight.accuracy
    assert [r["loss"] for r in resumed.finetune] == [r["loss"] for r in straight.finetune]
