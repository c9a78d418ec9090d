"""snl: the published algorithm, exact budgets, bad input, the command."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastbcd
from fastbcd import MaskedReLU
from fastbcd.cli import main as cli
from fastbcd.descent.budget import limits_of
from fastbcd.masking.twin import twin
from fastbcd.starts.snl import Selective, SoftReLU, growth, snl
from fastbcd.training.loop import Trainer
from fastbcd.training.settings import Finetune
from helpers.nets import images, make, thinned
from helpers.start_cases import QUICK, SHORT, Other, data, same, state, write_images

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
        assert abs(record["count"] - count) <= 2  # units at the threshold, by rounding
    # The gradient of a convolution's bias before a batch norm is rounding, which Adam amplifies.
    noise = ("0.bias", "running_mean") if name == "resnet" else ()
    for key, value in student.state_dict().items():
        if not key.endswith(("alphas", "num_batches_tracked", *noise)):
            torch.testing.assert_close(net.state_dict()[key], value, rtol=1e-4, atol=1e-4)


def test_lambda_on_a_sequence_of_counts() -> None:
    """From the sixth epoch on, after every epoch without a new minimum."""
    counts = [100, 90, 90, 95, 90, 90, 91, 89, 89, 80, 85]
    grew = [False, False, False, False, False, True, True, False, True, False, True]
    assert growth(counts, lowest=100) == grew
    assert growth([], lowest=100) == []


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
    trainer = Trainer(soft, train, SHORT)
    assert any(n.op == "call_module" and len(n.args) == 2 for n in trainer.model.graph.nodes)
    x, labels = next(train.batches(16))
    grads = []
    for model in (soft, trainer.model):
        model.eval()
        loss = F.cross_entropy(model(x), labels)
        grads.append(torch.autograd.grad(loss, list(trainer.trained.values())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------------------------- results


def test_exact_budget_and_records() -> None:
    net, train = make("resnet"), data()
    total = fastbcd.masks(net).count()
    start = snl(net, train, 300, test=data(40), **QUICK)
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
        assert record["lambda_updates"] >= 0
        assert "test_accuracy" in record
    assert start.history[0]["iou"] is None
    assert all(0 <= r["iou"] <= 1 for r in start.history[1:])
    assert all(0 <= iou <= 1 and a > 0 and b > 0 for a, b, iou in start.overlaps)
    assert "300 ReLUs" in repr(start)
    assert net.training is False


def test_exact_keeps_the_largest_numbers(monkeypatch) -> None:
    """Also units under the threshold, if the training stopped below the budget."""
    decided, largest = [], Selective.largest

    def noted(self, values):
        decided.append((values, largest(self, values)))
        return decided[-1][1]

    monkeypatch.setattr(Selective, "largest", noted)
    start = snl(make("mlp"), data(), 34, **QUICK)
    ((values, chosen),) = decided
    assert values[chosen.bits].min() >= values[~chosen.bits].max()
    assert start.history[-1]["count"] < 34 == chosen.count()


def test_of_equal_numbers_the_first_is_kept() -> None:
    net = make("mlp")
    method = Selective(net, SimpleNamespace(budget=3, limits=limits_of(3, net)))
    values = torch.zeros(50)
    values[[7, 9]] = 1
    assert method.largest(values).bits.nonzero().flatten().tolist() == [0, 7, 9]


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


def test_too_few_epochs_warn() -> None:
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


def test_weights_keep_their_memory_format() -> None:
    net = make("resnet")
    snl(net, data(), 300, **QUICK)
    assert all(p.is_contiguous() for p in net.parameters())


# -------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"budget": 51}, ValueError, "budget=51; the net keeps 50 ReLUs"),
        ({"budget": -1}, ValueError, "budget=-1"),
        ({"budget": 2.5}, TypeError, "budget=2.5; it must be a whole number"),
        ({"teacher": Other()}, ValueError, "the teacher has 7 classes and the net 5"),
        ({"lr": 0.0}, ValueError, "lr=0.0; it must be finite and above 0"),
        ({"kappa": 0.9}, ValueError, "kappa=0.9; it must be finite and at least 1"),
        ({"lambda0": float("nan")}, ValueError, "lambda0=nan"),
        ({"lambda0": "1"}, TypeError, "lambda0='1'; it must be a number"),
        ({"max_epochs": -1}, ValueError, "max_epochs=-1"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
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


# ------------------------------------------------------------------------------ the command


def test_the_command(tmp_path, capsys) -> None:
    line = [
        "snl", "--model", "helpers.start_cases:small_net",
        "--data", write_images(tmp_path / "data.npz"),
        "--lr", "0.03", "--lambda0", "0.003", "--kappa", "1.5", "--finetune-epochs", "1",
        "--batch-size", "32", "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    assert cli.main([*line, "--budget", "20"]) == 0
    shown = capsys.readouterr()
    assert "20 ReLUs after" in shown.out
    assert "λ 0.003" in shown.out + shown.err
    assert cli.main([*line, "--budget", "20", "--quiet"]) == 0  # a finished run is reported again
    assert "20 ReLUs after" in capsys.readouterr().out
    assert cli.main([*line, "--budget", "99"]) == 2
    assert "the net keeps 50 ReLUs" in capsys.readouterr().err
