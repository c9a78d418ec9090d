"""Ordinary use: trainings that diverge, arguments of the wrong kind, plans and log files."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd.descent.job import Job, Search
from fastbcd.descent.plan import _seconds, planned
from fastbcd.runs import fingerprint as snapshots
from helpers.run_cases import contents, nudge, small_run

X = torch.randn(60, 1, 4, 4, generator=torch.Generator().manual_seed(1))
DATA = X, X.flatten(1)[:, :3].argmax(1)


def model(relu: type = nn.ReLU, *sizes: int) -> nn.Module:
    """Sites of 30 and 20 neurons."""
    torch.manual_seed(0)
    first, second = (relu(n) if relu is not nn.ReLU else relu() for n in (30, 20))
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 30), first, nn.Linear(30, 20), second, nn.Linear(20, 3)
    )


def masked() -> Any:
    return model(fastbcd.MaskedReLU)


class Net(nn.Module):
    pass


# ------------------------------------------------------------------------------- divergence


def descend(
    way: str, number: int, folder: Any, net: nn.Module, *, layer: str = "3.bias", **more: Any
) -> None:
    """Three steps; after the training of step `number` weights of a layer are too large."""

    def train(net: nn.Module, step: fastbcd.Step) -> None:
        nudge(net, step)
        if step.number == number:
            with torch.no_grad():
                net.get_parameter(layer)[4:] = 3e38 if layer == "3.weight" else torch.inf

    train.__qualname__ = "train"
    options: dict[str, Any] = {"budget": 20, "drc": 10, "rt": 2, "run_dir": folder, **more}
    if way == "bcd":
        fastbcd.bcd(net, DATA, finetune=train, **options)
    else:
        for step in fastbcd.steps(net, DATA, **options):
            train(net, step)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("way", ["bcd", "steps"])
def test_a_step_that_diverges_is_undone_and_not_saved(way, number, tmp_path) -> None:
    net = masked()
    words = f"3.bias is not finite after step {number}, which is undone"
    with pytest.raises(FloatingPointError, match=words):
        descend(way, number, tmp_path / "run", net)
    assert fastbcd.masks(net).count() == 60 - 10 * number
    assert all(t.isfinite().all() for t in snapshots.tensors_of(net).values())
    saved = fastbcd.load_run(tmp_path / "run", model=masked())
    assert (saved.done, len(saved.history)) == (False, number - 1)
    descend(way, 0, tmp_path / "run", net)
    assert fastbcd.load_run(tmp_path / "run", model=masked()).done


@pytest.mark.parametrize("test", [None, DATA])
@pytest.mark.parametrize("way", ["bcd", "steps"])
def test_a_step_whose_outputs_overflow_is_undone_and_not_saved(way, test, tmp_path) -> None:
    """Its weights are finite; products of them are not."""
    net = masked()
    options: dict[str, Any] = {"test": test, "test_every": 3}
    with pytest.raises(FloatingPointError, match="gives NaN logits for image"):
        descend(way, 2, tmp_path / "run", net, layer="3.weight", **options)
    saved = fastbcd.load_run(tmp_path / "run", model=masked())
    assert len(saved.history) == 1
    descend(way, 0, tmp_path / "run", net, **options)
    assert fastbcd.load_run(tmp_path / "run", model=masked()).done


# ----------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fastbcd.linearize(Net, DATA, 8), TypeError, "model is the class Net; give a"),
        (lambda: fastbcd.linearize(DATA, model(), 8), TypeError, "model is a tuple; give a torch"),
        (lambda: fastbcd.bcd(DATA, masked(), 8), TypeError, "net is a tuple; give a torch"),
        (lambda: fastbcd.bcd(masked(), 8, DATA), TypeError, "data is a int"),
        (lambda: fastbcd.linearize(model(), (X[:0], DATA[1][:0]), 8), ValueError, "no images"),
        (lambda: fastbcd.linearize(model(), DATA, 8, learning_rate=0.1), TypeError, "mean 'lr'"),
        (lambda: fastbcd.bcd(masked(), DATA, "8"), TypeError, "budget='8'; it must be a whole"),
    ],
)
def test_arguments_of_the_wrong_kind(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_budget_may_be_a_tensor(tmp_path) -> None:
    for way in (fastbcd.bcd, fastbcd.linearize):
        folder = tmp_path / way.__name__
        options = {"drc": 30, "finetune": None} if way is fastbcd.bcd else {"epochs": 1}
        run = way(masked(), DATA, torch.tensor(20), run_dir=folder, progress=False, **options)
        assert run.masks.count() == 20
        assert json.loads((folder / "config.json").read_text())["settings"]["budget"] == 20


def test_a_loss_that_is_no_number_is_refused() -> None:
    net = masked()
    with pytest.raises(TypeError, match=r"step\.train_loss='0\.5'; it must be a number"):
        fastbcd.bcd(net, DATA, 20, drc=30, rt=1, finetune=lambda net, step: {"loss": "0.5"})
    assert fastbcd.masks(net).count() == 50
    for step in fastbcd.steps(net, DATA, 20, drc=30, rt=1):
        step.train_loss = torch.tensor(0.5)
    assert step.train_loss == 0.5


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"budget": 9}, "budget is 8 there and 9 now"),
        ({"epochs": 4}, "epochs is 3 there and 4 now"),
        ({"max_sites": 1}, "max_sites is null there and 1 now"),
        ({"lr": 0.5}, "finetune.lr is 0.003 there and 0.5 now"),
        ({"batch_size": 40}, "finetune.batch_size is 25 there and 40 now"),  # other steps, too
    ],
)
def test_a_change_is_refused_by_the_name_that_the_user_changed(changed, name, tmp_path) -> None:
    options = {"budget": 8, "epochs": 3, "run_dir": tmp_path, "padding": 0, "progress": False}
    fastbcd.linearize(model(), DATA, **options)
    with pytest.raises(ValueError, match=f"holds another run: {name}"):
        fastbcd.linearize(model(), DATA, **(options | changed))


# ------------------------------------------------------------------------- plans and messages


def test_linearize_tests_about_ten_times() -> None:
    def tested(**options: Any) -> list[int]:
        run = fastbcd.linearize(
            model(), DATA, 8, epochs=10, batch_size=15, test=DATA, padding=0, progress=False,
            **options,
        )  # fmt: skip
        return [step.number for step in run.history if step.test_accuracy is not None]

    assert tested() == [3, 6, 9, 12, 15, 18, 21, 24, 27, 28]
    assert len(tested(test_every=1)) == 28


def test_a_plan_counts_the_tests_of_the_run(capsys, monkeypatch) -> None:
    seconds = {"scoring": [], "testing": []}  # type: dict[str, list[float]]
    monkeypatch.setattr("fastbcd.descent.plan._time", lambda work, data: 86_400.0)
    for every in (1, 3):
        fastbcd.bcd(masked(), DATA, 10, drc=4, finetune=None, test=DATA, test_every=every,
                    dry_run=True)  # fmt: skip
        line = capsys.readouterr().out.splitlines()[-1]
        seconds["testing"].append(float(line.partition("testing ")[2].split()[0]))
        assert "scoring 10.0 days" in line
    assert seconds["testing"] == [10.0, 4.0]


def test_a_plan_is_printed_before_it_is_timed(capsys, monkeypatch) -> None:
    printed = []

    def timed(work: Any, data: Any) -> float:
        printed.append(capsys.readouterr().out)
        return 1.0

    monkeypatch.setattr("fastbcd.descent.plan._time", timed)
    fastbcd.bcd(masked(), DATA, 10, drc=4, finetune=None, dry_run=True)
    assert "10 steps" in printed[0]


@pytest.mark.parametrize("slower", [1.2, 3.0])
def test_a_plan_warns_of_small_batches_per_rank(slower, capsys, monkeypatch) -> None:
    """A rank's part of a batch is timed; what takes as long as the whole batch is named."""

    def timed(work: Any, data: Any) -> float:
        shared = getattr(work, "keywords", {"ranks": 1})["ranks"]
        return slower if shared == 4 else 1.0

    monkeypatch.setattr("fastbcd.descent.plan._time", timed)
    job = Job.of(masked(), DATA, 10, Search(drc=25), finetune=fastbcd.Finetune(epochs=1))
    plan = planned(job, [], fastbcd.masks(job.problem.net))
    seconds = _seconds(job, plan, world=4)
    out = capsys.readouterr().out
    assert seconds == {"scoring": 2.0, "training": 2 * slower}
    assert ("the host is the limit" in out) == (slower == 3.0)
    assert ("3.0 times as long per image" in out) == (slower == 3.0)


def test_a_plan_times_the_batches_of_one_rank(monkeypatch) -> None:
    sizes: list[int] = []

    class Spy(fastbcd.Finetuner):
        def run(self, *args: Any, **options: Any) -> dict[str, float]:
            sizes.append(self.settings.batch_size)
            return super().run(*args, **options)

    settings = fastbcd.Finetune(epochs=1, batch_size=16, padding=0)
    job = Job.of(masked(), DATA, 10, Search(drc=25), finetune=settings)
    monkeypatch.setattr("fastbcd.descent.tuning.Finetuner", Spy)
    for ranks in (1, 4, 64):
        job.training.rehearse(job.problem.train, ranks=ranks)
    assert sizes == [16, 4, 1]


def test_a_resumed_run_plans_what_is_left(capsys, tmp_path) -> None:
    def stop(net: nn.Module, step: fastbcd.Step) -> None:
        if step.number == 3:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"drc": 10, "rt": 1, "run_dir": tmp_path, "finetune": stop}
    with pytest.raises(KeyboardInterrupt):
        fastbcd.bcd(masked(), DATA, 7, **options)
    plan = "30 ReLUs, budget 7\nplan: 3 steps that remove 10, 10, 3 ReLUs"
    fastbcd.bcd(masked(), DATA, 7, dry_run=True, **options)
    assert plan in capsys.readouterr().out
    stop.__code__ = (lambda net, step: None).__code__
    fastbcd.bcd(masked(), DATA, 7, progress=True, **options)
    assert plan in capsys.readouterr().out


def test_progress_changes_no_outcome(tmp_path) -> None:
    """A plan scores and trains to time it: what it makes is not used."""
    for progress in (False, True):
        small_run(tmp_path / str(progress), progress=progress, engine="collapsed")
    assert contents(tmp_path / "True") == contents(tmp_path / "False")


def test_messages_go_through_logging(caplog, capsys) -> None:
    logger = logging.getLogger("fastbcd")
    before = logger.handlers[:]
    logger.handlers[:] = [caplog.handler]
    try:
        fastbcd.bcd(masked(), DATA, 20, drc=30, rt=1, finetune=None, progress=True)
    finally:
        logger.handlers[:] = before
    assert [line.partition(":")[0] for line in caplog.messages][-1] == "step 1"
    assert capsys.readouterr() == ("", "")
