"""What the starting points share: resuming in any phase, the fine-tune, continuing from them."""

from __future__ import annotations

import copy

import pytest
import torch

import fastbcd
from fastbcd.starts.mask_training import MOST, Overlaps
from fastbcd.starts.snl import snl
from fastbcd.training.finetuner import Finetuner
from fastbcd.training.loop import Session
from fastbcd.training.settings import Finetune
from helpers.nets import make, thinned
from helpers.start_cases import QUICK, SHORT, data, same, state, stopped_at

# --------------------------------------------------------------------------------- resuming


@pytest.mark.filterwarnings("ignore:.*more than the budget:RuntimeWarning")
def test_the_default_teacher_is_the_net_at_the_start_of_the_run(tmp_path, monkeypatch) -> None:
    """Whatever weights the net has when the run is resumed."""
    short = {**QUICK, "max_epochs": 4}
    straight = snl(make("resnet"), data(), 250, **short)
    net = make("resnet")
    given = state(net)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "epoch", stopped_at(2))
        with pytest.raises(KeyboardInterrupt):
            snl(net, data(), 250, run_dir=tmp_path, **short)
    assert same(state(net), given)
    assert all(p.is_contiguous() for p in net.parameters())
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
    resumed = snl(net, data(), 250, run_dir=tmp_path, **short)
    assert same(state(resumed.model), state(straight.model))


def test_another_run_in_the_directory_is_refused(tmp_path) -> None:
    snl(make("mlp"), data(), 40, run_dir=tmp_path, **QUICK)
    with pytest.raises(ValueError, match=r"another run: budget is 40 there and 30 now"):
        snl(make("mlp"), data(), 30, run_dir=tmp_path, **QUICK)


# ------------------------------------------------------------------- continuing from a start

STARTS = {
    "snl": {**QUICK, "max_epochs": 2},
    "deepreduce": {"epochs": 11, "trial_epochs": 1, "batch_size": 32, "finetune": SHORT},
    "senet": {"epochs": 2, "every": 1, "batch_size": 32, "finetune": SHORT},
    "relupruner": {"epochs": 2, "warmup": 0, "interval": 1, "batch_size": 32, "finetune": SHORT},
    "autorep": {"epochs": 2, "batch_size": 32, "finetune": SHORT},
}


@pytest.mark.parametrize("method", STARTS)
def test_a_fine_tune_of_your_own_is_refused(method) -> None:
    with pytest.raises(TypeError, match=r"finetune is a function; give a fastbcd\.Finetune"):
        getattr(fastbcd, method)(
            make("resnet"), data(), 9, **{**STARTS[method], "finetune": lambda net, step: None}
        )


@pytest.mark.filterwarnings("ignore:.*more than the budget:RuntimeWarning")
@pytest.mark.parametrize(
    ("method", "kind"), [*((method, "resnet") for method in STARTS), ("senet", "poly")]
)
def test_bcd_and_linearize_continue_from_it(method, kind) -> None:
    start = getattr(fastbcd, method)(make(kind), data(), 120, **STARTS[method])
    dense, kept = make("resnet"), start.masks.bits.clone()
    settings = {"epochs": 2, "rt": 2, "padding": 1, "progress": False, "start": start}
    if method == "autorep" or kind == "poly":
        settings["replacement"] = "poly"
    polished = fastbcd.linearize(dense, data(), 120, **settings)
    further = fastbcd.linearize(dense, data(), 100, **settings)
    run = fastbcd.bcd(start.model, data(), 100, drc=10, rt=2, finetune=None)
    assert torch.equal(polished.masks.bits, kept)
    for found in (run, further):
        assert found.masks.count() == 100
        assert not (found.masks.bits & ~kept).any()


# ---------------------------------------------------------------------------- the fine-tune


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_fine_tune_is_finetuners(optimizer) -> None:
    """One epoch per call gives the same as Finetuner.run."""
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
def test_an_interrupted_fine_tune_resumes(tmp_path, monkeypatch, optimizer) -> None:
    tune = Finetune(epochs=4, lr=0.01, padding=1, optimizer=optimizer, batch_size=32)
    settings = {**QUICK, "finetune": tune}
    straight = snl(make("resnet"), data(), 700, **settings)
    for epoch in (0, 2):
        with monkeypatch.context() as patch:
            patch.setattr(Session, "epoch", stopped_at(epoch, step=1))
            with pytest.raises(KeyboardInterrupt):
                snl(make("resnet"), data(), 700, run_dir=tmp_path, **settings)
    resumed = snl(make("resnet"), data(), 700, run_dir=tmp_path, **settings)
    assert same(state(resumed.model), state(straight.model))
    assert resumed.accuracy == straight.accuracy
    assert [r["loss"] for r in resumed.finetune] == [r["loss"] for r in straight.finetune]


def test_a_net_with_views_is_measured_while_it_is_trained() -> None:
    """Its weights are in channels_last memory then, which a view of its own forward refuses."""
    with pytest.warns(RuntimeWarning, match="more than the budget"):
        start = snl(make("sizes"), data(32), 20, test=data(8), max_epochs=1, **QUICK)
    trained = fastbcd.train(make("sizes"), data(32), epochs=1, padding=1, test=data(8))
    assert all(record["test_accuracy"] for record in start.history)
    assert trained.history[0].test_accuracy


# ------------------------------------------------------------------------------- overlaps


def test_overlaps_keep_evenly_spread_masks_and_resume() -> None:
    straight, first = Overlaps(8), Overlaps(8)
    g = torch.Generator().manual_seed(0)
    masks = torch.rand(300, 8, generator=g) > 0.3
    for epoch in range(300):
        straight.add(epoch, masks[epoch])
        if epoch < 150:
            first.add(epoch, masks[epoch])
    assert len(straight.packed) <= MOST
    assert sorted(straight.packed)[:3] == [0, 8, 16]
    resumed = Overlaps(8)
    resumed.load(first.state(), 150)
    found = [resumed.add(epoch, masks[epoch]) for epoch in range(150, 300)]
    assert resumed.pairs(0) == straight.pairs(0)
    both = (masks[149] & masks[150]).sum() / min(masks[149].sum(), masks[150].sum())
    assert found[0] == pytest.approx(float(both))
