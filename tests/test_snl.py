"""snl: the published formulas and schedule, exact budgets, resuming, bad input."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastbcd
from fastbcd import MaskedReLU, cli, snapshots
from fastbcd.data import as_data
from fastbcd.finetuning import Finetune, Finetuner
from fastbcd.starts.gates import SoftReLU, largest, twin
from fastbcd.starts.overlaps import MOST, Overlaps
from fastbcd.starts.snl import Penalty, snl
from fastbcd.starts.training import Training
from nets import images, make, thinned

SHORT = Finetune(epochs=1, padding=1, teacher_cache=10**7)
QUICK = {"lr": 0.03, "lambda0": 3e-3, "kappa": 1.5, "batch_size": 32, "finetune": SHORT}


def data(n: int = 96):
    return as_data(images(n))


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return snapshots.take(net)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ------------------------------------------------------------------ the published algorithm


class PublishedReLU(nn.Module):
    """SNL's activation, as its paper writes it."""

    def __init__(self, act: MaskedReLU) -> None:
        super().__init__()
        self.alphas = nn.Parameter(act.mask.float())
        self.order = act.order

    def forward(self, x):
        return self.alphas * F.relu(x) + (1 - self.alphas) * x


def published_snl(net, train, budget, *, lr, lambda0, kappa, threshold, batch_size, epochs):
    """SNL's mask phase in plain PyTorch; counts, λ of each epoch, the trained net's tensors."""
    teacher = copy.deepcopy(net).eval()
    student = copy.deepcopy(net)
    sites = {n: m for n, m in student.named_modules() if isinstance(m, MaskedReLU)}
    for name, act in sites.items():
        student.set_submodule(name, PublishedReLU(act))
    alphas = [m.alphas for m in student.modules() if isinstance(m, PublishedReLU)]
    optimizer = torch.optim.Adam(student.parameters(), lr)
    lam, counts, lambdas = lambda0, [], []
    lowest = sum(int((a > threshold).sum()) for a in alphas)
    for epoch in range(epochs):
        student.train()
        lambdas.append(lam)
        for x, labels, _, _ in train.train_batches(
            batch_size, seed=0, step=0, epoch=epoch, padding=SHORT.padding
        ):
            s = student(x)
            with torch.no_grad():
                t = teacher(x)
            kd = F.kl_div(F.log_softmax(s / 4, 1), F.softmax(t / 4, 1), reduction="batchmean") * 16
            loss = F.cross_entropy(s, labels) + kd + lam * sum(torch.norm(a, p=1) for a in alphas)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        counts.append(sum(int((a > threshold).sum()) for a in alphas))
        if counts[-1] < lowest:
            lowest = counts[-1]
        elif epoch >= 5:
            lam *= kappa
        if counts[-1] <= budget:
            break
    return counts, lambdas, student


@pytest.mark.parametrize("name", ["resnet", "mlp"])
def test_the_mask_training_is_the_published_one(name) -> None:
    """Same counts and λ, the same weights up to rounding, through several updates of λ."""
    net, train = make(name), data()
    settings = {"lr": 2e-3, "lambda0": 1e-3, "kappa": 3.0, "threshold": 0.97, "batch_size": 48}
    counts, lambdas, student = published_snl(net, train, 1, **settings, epochs=9)
    with pytest.warns(RuntimeWarning, match="more than the budget"):
        start = snl(net, train, 1, **settings, max_epochs=9, finetune=Finetune(epochs=0, padding=1))
    assert [r["lambda"] for r in start.history] == lambdas
    assert max(lambdas) > lambdas[0]
    assert min(counts) < counts[0]
    for record, count in zip(start.history, counts, strict=True):
        assert abs(record["count"] - count) <= 2  # rounding decides on a unit at the threshold
    # A convolution's bias before a batch norm has a gradient of pure rounding, which Adam blows up.
    noise = ("0.bias", "running_mean") if name == "resnet" else ()
    for key, value in student.state_dict().items():
        if not key.endswith(("alphas", "num_batches_tracked", *noise)):
            torch.testing.assert_close(net.state_dict()[key], value, rtol=1e-4, atol=1e-4)


def test_lambda_on_a_sequence_of_counts() -> None:
    """From the sixth epoch on, after every epoch without a new minimum."""
    penalty = Penalty(1e-5, kappa=1.1, lowest=100)
    counts = [100, 90, 90, 95, 90, 90, 91, 89, 89, 80, 85]
    grew = [penalty.after(epoch, count) for epoch, count in enumerate(counts)]
    assert grew == [False, False, False, False, False, True, True, False, True, False, True]
    assert penalty.updates == 4
    assert penalty.weight == pytest.approx(1e-5 * 1.1**4)
    assert penalty.lowest == 80


def test_the_twin_computes_what_the_net_computes() -> None:
    net = thinned(make("resnet"))
    soft = twin(net, lambda act: SoftReLU(act.mask))
    x = images(8)[0]
    torch.testing.assert_close(soft(x), net(x))
    assert all(a is b for a, b in zip(net.parameters(), _weights(soft), strict=True))


def _weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if not n.endswith("alpha")]


def test_fused_additions_train_alike() -> None:
    """The rewritten graph with act(a + b) in one call gives the twin's own gradients."""
    net, train = thinned(make("resnet")), data(32)
    soft = twin(net, lambda act: SoftReLU(act.mask))
    training = Training(soft, train, None, SHORT, torch.optim.Adam, batch_size=32, seed=0, step=0)
    assert any("fused" in n for n, _ in training.model.named_modules())
    training.close()  # a strided 1×1 convolution is safe in channels_last only when rewritten
    x, labels = next(train.batches(16))
    grads = []
    for model in (soft, training.model):
        model.eval()
        loss = F.cross_entropy(model(x), labels)
        grads.append(torch.autograd.grad(loss, list(training.trained.values())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------------------------- results


def test_exact_budget_and_records() -> None:
    net, train = make("resnet"), data()
    total = fastbcd.masks(net).count()
    start = snl(net, train, 300, test=data(40), watch=[0, 5, 7], **QUICK)
    assert start.model is net
    assert start.masks.count() == fastbcd.masks(net).count() == 300
    assert start.measured_on == "test"
    assert set(start.accuracy) == {"trained", "thresholded", "final"}
    counts = [r["count"] for r in start.history]
    assert counts[-1] <= 300 < min(counts[:-1])
    assert [r["decrease"] for r in start.history] == [
        a - b for a, b in zip([total, *counts], counts, strict=False)
    ]
    for record in start.history:
        assert len(record["alphas"]) == 3
        assert record["lambda_updates"] >= 0
        assert "test_accuracy" in record
    assert start.history[0]["iou"] is None
    assert all(0 <= r["iou"] <= 1 for r in start.history[1:])
    assert all(0 <= iou <= 1 and a > 0 and b > 0 for a, b, iou in start.overlaps)
    assert "300 ReLUs" in repr(start)
    assert net.training is False


def test_exact_keeps_the_largest_numbers(monkeypatch) -> None:
    """Also units under the threshold, if the training stopped below the budget."""
    decided = []
    from fastbcd.starts import snl as module

    def noted(current, values, budget):
        decided.append((values, largest(current, values, budget)))
        return decided[-1][1]

    monkeypatch.setattr(module, "largest", noted)
    start = snl(make("mlp"), data(), 34, **QUICK)
    ((values, chosen),) = decided
    assert values[chosen.bits].min() >= values[~chosen.bits].max()
    assert start.history[-1]["count"] < 34 == chosen.count()


def test_as_published_it_stops_below_the_budget() -> None:
    net = make("mlp")
    start = snl(net, data(), 30, **{**QUICK, "exact": False})
    assert start.masks.count() == start.history[-1]["count"] <= 30


def test_removed_relus_stay_removed() -> None:
    net = thinned(make("resnet"))
    before = fastbcd.masks(net).bits.clone()
    start = snl(net, data(), 150, **QUICK)
    assert start.masks.count() == 150
    assert not (start.masks.bits & ~before).any()


def test_a_budget_that_is_met_trains_nothing_but_fine_tunes() -> None:
    net = make("mlp")
    start = snl(net, data(), 50, **QUICK)
    assert start.history == []
    assert start.masks.count() == 50


def test_too_few_epochs_are_said() -> None:
    for exact, count in ((True, 5), (False, 50)):
        with pytest.warns(RuntimeWarning, match="more than the budget of 5"):
            start = snl(make("mlp"), data(), 5, max_epochs=1, exact=exact, finetune=None)
        assert start.masks.count() == count


def test_the_same_call_gives_the_same_bits() -> None:
    runs = [snl(make("resnet"), data(), 250, **QUICK) for _ in range(2)]
    assert same(state(runs[0].model), state(runs[1].model))
    other = snl(make("resnet"), data(), 250, **QUICK, seed=1)
    assert not same(state(runs[0].model), state(other.model))


def test_a_given_teacher_is_used() -> None:
    torch.manual_seed(0)
    teacher = make("mlp")
    nn.init.normal_(teacher.get_parameter("5.weight"))
    ours = [snl(make("mlp"), data(), 20, teacher=t, **QUICK) for t in (None, teacher)]
    assert not same(state(ours[0].model), state(ours[1].model))


def test_layout_of_the_weights_is_given_back() -> None:
    net = make("resnet")
    snl(net, data(), 300, **QUICK)
    assert all(p.is_contiguous() for p in net.parameters())


# --------------------------------------------------------------------------------- resuming

KILLED = """
import os, sys, signal
sys.path.insert(0, {tests!r})
import fastbcd, test_snl
from fastbcd.runs import RunDirectory
whole = RunDirectory._save
def save(self, step, tensors, record):
    answer = whole(self, step, tensors, record)
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer
RunDirectory._save = save
test_snl.snl(test_snl.make("resnet"), test_snl.data(), 250, run_dir={folder!r}, **test_snl.QUICK)
"""


def test_a_killed_run_goes_on_to_the_same_result(tmp_path) -> None:
    straight = snl(make("resnet"), data(), 250, **QUICK)
    assert len(straight.history) > 4
    code = KILLED.format(tests=str(Path(__file__).parent), step=3, folder=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    resumed = snl(make("resnet"), data(), 250, run_dir=tmp_path / "run", **QUICK)
    assert same(state(resumed.model), state(straight.model))
    keys = ("count", "lambda", "loss", "iou", "alphas", "decrease")
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
    whole = Training.epoch

    def interrupted(self, epoch, *rest, **more):
        if epoch == 2:
            raise KeyboardInterrupt
        return whole(self, epoch, *rest, **more)

    net = make("resnet")
    given = state(net)
    monkeypatch.setattr(Training, "epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        snl(net, data(), 250, run_dir=tmp_path, **QUICK)
    monkeypatch.undo()
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


def test_overlaps_keep_evenly_spread_masks_and_resume() -> None:
    sites = fastbcd.MaskSet.full({"act": (8,)}).sites
    straight, first = Overlaps(sites), Overlaps(sites)
    g = torch.Generator().manual_seed(0)
    masks = torch.rand(300, 8, generator=g) > 0.3
    for epoch in range(300):
        straight.add(epoch, masks[epoch])
        if epoch < 150:
            first.add(epoch, masks[epoch])
    assert len(straight.packed) <= MOST
    assert sorted(straight.packed)[:3] == [0, 8, 16]
    resumed = Overlaps(sites)
    resumed.load(first.state(), 150)
    found = [resumed.add(epoch, masks[epoch]) for epoch in range(150, 300)]
    assert resumed.pairs(0) == straight.pairs(0)
    both = (masks[149] & masks[150]).sum() / min(masks[149].sum(), masks[150].sum())
    assert found[0] == pytest.approx(float(both))


# -------------------------------------------------------------------------------- bad input


class Other(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :7]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"budget": 51}, ValueError, "budget=51; the net keeps 50 ReLUs"),
        ({"budget": -1}, ValueError, "budget=-1"),
        ({"budget": 2.5}, TypeError, "whole number of ReLUs"),
        ({"teacher": Other()}, ValueError, "the teacher has 7 classes and the net 5"),
        ({"lr": 0.0}, ValueError, "lr=0.0; it must be finite and above 0"),
        ({"kappa": 0.9}, ValueError, "kappa=0.9; it must be finite and at least 1"),
        ({"lambda0": float("nan")}, ValueError, "lambda0=nan"),
        ({"lambda0": "1"}, TypeError, "lambda0='1'; it must be a number"),
        ({"max_epochs": -1}, ValueError, "max_epochs=-1"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"watch": [50]}, IndexError, "watch: id 50 is out of range"),
        ({"resume": "maybe"}, ValueError, "resume='maybe'"),
        ({"test": (torch.zeros(2, 3, 8, 8), torch.tensor([0, 9]))}, ValueError, "label 9"),
    ],
)
def test_bad_input(change, error, words) -> None:
    arguments = {"net": make("mlp"), "data": data(), "budget": 10, **change}
    before = state(arguments["net"])
    with pytest.raises(error, match=words):
        snl(**arguments)
    assert same(state(arguments["net"]), before)


def test_polynomial_sites_are_refused() -> None:
    with pytest.raises(ValueError, match=r"site '2' is a MaskedPoly.*fastbcd\.autorep"):
        snl(make("poly"), data(), 10)
    with pytest.raises(ValueError, match="no masked activations"):
        snl(nn.Linear(2, 2), data(), 10)
    with pytest.raises(TypeError, match="net is a str"):
        snl("net", data(), 10)


def test_a_loss_that_is_not_finite_stops_and_restores() -> None:
    net = make("mlp")
    before = state(net)
    with pytest.raises(FloatingPointError, match="not finite in epoch"):
        snl(net, data(), 10, **{**QUICK, "lr": 1e30})
    assert same(state(net), before)


# ------------------------------------------------------------------------------------ ranks

RANKS = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import rank_cases, test_snl
folder = Path({folder!r})
print(json.dumps([rank_cases.on_ranks(test_snl.on_a_rank, folder, world) for world in (2, 1)]))
"""


def on_a_rank(folder: Path) -> dict:
    """What one rank of a run finds; the net has no batch norm, so that its shares do not matter."""
    world = fastbcd.ranks.world()
    start = snl(make("mlp"), data(61), 30, run_dir=folder / f"snl{world}", **QUICK)
    weights = state(start.model)
    return {
        "digest": fastbcd.ranks.digest(weights).hex(),
        "counts": [r["count"] for r in start.history],
        "kept": start.masks.count(),
        "weights": weights["5.weight"].flatten().tolist(),
        "accuracy": start.accuracy,
    }


def test_two_ranks_train_as_one(tmp_path) -> None:
    code = RANKS.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
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
    whole, stops = Training.epoch, [0, 2]

    def interrupted(self, epoch, *rest, **more):
        if self.step == 1 and epoch == stops[0]:
            raise KeyboardInterrupt
        return whole(self, epoch, *rest, **more)

    monkeypatch.setattr(Training, "epoch", interrupted)
    while stops:
        with pytest.raises(KeyboardInterrupt):
            snl(make("resnet"), data(), 700, run_dir=tmp_path, **settings)
        del stops[0]
    monkeypatch.undo()
    resumed = snl(make("resnet"), data(), 700, run_dir=tmp_path, **settings)
    assert same(state(resumed.model), state(straight.model))
    assert resumed.accuracy == straight.accuracy
    assert [r["loss"] for r in resumed.finetune] == [r["loss"] for r in straight.finetune]


# ------------------------------------------------------------------------------ the command


def small_net() -> nn.Module:
    return make("mlp")


def write_images(path: Path) -> str:
    """An .npz file with both splits."""
    g = np.random.default_rng(0)
    splits = {}
    for split, n in (("train", 60), ("test", 20)):
        splits[f"{split}_images"] = g.integers(0, 256, (n, 8, 8, 3), np.uint8)
        splits[f"{split}_labels"] = np.arange(n) % 5
    np.savez(path, **splits)
    return str(path)


def test_the_command(tmp_path, capsys) -> None:
    line = [
        "snl", "--model", "test_snl:small_net", "--data", write_images(tmp_path / "data.npz"),
        "--lr", "0.03", "--lambda0", "0.003", "--kappa", "1.5", "--finetune-epochs", "1",
        "--batch-size", "32", "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    assert cli.main([*line, "--budget", "20"]) == 0
    shown = capsys.readouterr()
    assert "20 ReLUs after" in shown.out
    assert "λ 0.003" in shown.out + shown.err
    assert cli.main([*line, "--budget", "20", "--quiet"]) == 0  # done: said again
    assert "20 ReLUs after" in capsys.readouterr().out
    assert cli.main([*line, "--budget", "99"]) == 2
    assert "the net keeps 50 ReLUs" in capsys.readouterr().err
