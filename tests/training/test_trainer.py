"""What all trainings share: frozen modules, dtypes, small last batches, finite weights."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import Finetune, Finetuner, MaskedReLU
from fastbcd.scoring.accuracy import accuracy
from fastbcd.training.loop import Session
from helpers.nets import make
from helpers.start_cases import stopped_at
from helpers.train_cases import SMALL, assert_same, pair, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.fx cannot trace:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:after . epochs .*more than the budget:RuntimeWarning"),
]
ONE = Finetune(epochs=1, padding=1, batch_size=16)
WAYS = {
    "finetune": lambda net, data: Finetuner(net, data, SMALL, make("mlp")).run(step=0) and net,
    "train": lambda net, data: fastbcd.train(net, data, epochs=2, batch_size=16, padding=1).model,
    "snl": lambda net, data: (
        fastbcd.snl(net, data, 5, max_epochs=2, batch_size=16, finetune=ONE).model
    ),
    "autorep": lambda net, data: (
        fastbcd.autorep(net, data, 5, epochs=2, batch_size=16, finetune=ONE).model
    ),
}


class Normed(nn.Module):
    """Two batch norms and a dropout (in-place if traceable)."""

    def __init__(self, traceable: bool) -> None:
        super().__init__()
        self.traceable = traceable
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.act1, self.act2 = MaskedReLU((4, 4, 4)), MaskedReLU((4, 2, 2))
        self.drop, self.head = nn.Dropout(0.5, inplace=traceable), nn.Linear(16, 5)

    def forward(self, x):
        y = self.act1(self.bn1(self.conv1(x)))
        if not self.traceable and not bool(y.abs().sum() >= 0):
            return y
        return self.head(self.drop(self.act2(self.bn2(self.conv2(y)))).flatten(1))


# ----------------------------------------------------------------------------------- frozen


@pytest.mark.parametrize("traceable", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_norm_in_eval_mode_keeps_its_statistics(way, traceable) -> None:
    torch.manual_seed(0)
    net = Normed(traceable).train()
    net.bn1.eval()
    before = weights(net)
    trained = WAYS[way](net, pair())
    after = weights(trained)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(after[f"bn1.{name}"], before[f"bn1.{name}"]), name
        assert not torch.equal(after[f"bn2.{name}"], before[f"bn2.{name}"]), name
    assert not torch.equal(after["bn1.weight"], before["bn1.weight"]), "parameters are trained"
    modes = {name: module.training for name, module in trained.named_modules()}
    assert not modes.pop("bn1")
    assert all(modes.values())


@pytest.mark.parametrize("way", WAYS)
def test_a_net_in_eval_mode_is_trained_as_a_whole(way) -> None:
    net = Normed(True).eval()
    trained = WAYS[way](net, pair())
    assert int(trained.bn1.num_batches_tracked) == int(trained.bn2.num_batches_tracked) > 0
    assert not any(module.training for module in trained.modules())


def test_a_dropout_in_eval_mode_does_not_drop() -> None:
    torch.manual_seed(0)
    net = Normed(True).train()
    net.drop.eval()
    without = copy.deepcopy(net)
    without.drop.p = 0.0
    without.drop.train()
    for one in (net, without):
        Finetuner(one, pair(), SMALL).run(step=0)
    assert_same(weights(net), weights(without))


# ----------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["resnet", "mixture"])
def test_any_dtype_is_trained(name, dtype) -> None:
    for way, work in WAYS.items():
        if (way, name) == ("snl", "mixture"):  # has polynomial sites
            continue
        net = make(name).to(dtype)
        before = weights(net)
        trained = work(net, pair())
        after = {k: v for k, v in weights(trained).items() if v.is_floating_point()}
        assert {v.dtype for v in after.values()} == {dtype}, way
        assert all(v.isfinite().all() for v in after.values()), way
        assert any(not torch.equal(v, before[k]) for k, v in after.items() if k in before), way
        assert 0 <= accuracy(trained, pair()) <= 100


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_net_in_another_dtype_is_trained_as_in_float32(dtype) -> None:
    net = make("resnet").to(dtype)
    single = copy.deepcopy(net).float()
    adam = Finetune(epochs=2, lr=1e-3, batch_size=16, padding=1, optimizer="adam")
    for one in (net, single):
        Finetuner(one, pair(), adam, make("mlp")).run(step=0)
    ulp = max(torch.finfo(dtype).eps, 1e-4)
    for (key, one), other in zip(weights(net).items(), weights(single).values(), strict=True):
        if not key.endswith(("0.bias", "running_mean")):  # a gradient of pure rounding
            torch.testing.assert_close(one.float(), other.float(), rtol=2 * ulp, atol=2 * ulp)


def test_a_run_in_half_precision_resumes_to_the_same_result(tmp_path, monkeypatch) -> None:
    settings = {"epochs": 4, "batch_size": 16, "padding": 1}
    nets = [make("resnet").bfloat16() for _ in range(3)]
    fastbcd.train(nets[0], pair(), **settings)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "epoch", stopped_at(2))
        with pytest.raises(KeyboardInterrupt):
            fastbcd.train(nets[1], pair(), run_dir=tmp_path, **settings)
    assert nets[1].get_parameter("0.weight").dtype == torch.bfloat16
    fastbcd.train(nets[2], pair(), run_dir=tmp_path, **settings)
    assert_same(weights(nets[0]), weights(nets[2]))


# ---------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("norm", [True, False])
def test_a_last_batch_of_one_joins_the_batch_before_it(norm) -> None:
    seen = []

    class Seen(nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return x

    net = nn.Sequential(
        nn.Flatten(), nn.Linear(192, 6), nn.BatchNorm1d(6) if norm else nn.Identity(),
        MaskedReLU(6), nn.Linear(6, 5), Seen(),
    )  # fmt: skip
    net.forward = lambda x: nn.Sequential.forward(net, x)  # not traced: `seen` stays a list
    tuner = Finetuner(net, pair(33), ONE)
    seen.clear()
    tuner.run(step=0)
    assert seen == ([16, 17] if norm else [16, 16, 1])


# ----------------------------------------------------------------------------------- finite


def test_a_weight_that_is_not_finite_after_the_last_batch_is_named() -> None:
    net = make("mlp")
    with pytest.raises(FloatingPointError, match=r"the weight 1\.weight is not finite in epoch 0"):
        Finetuner(net, pair(), Finetune(epochs=1, lr=1e300, batch_size=40)).run(step=0)


# -------------------------------------------------------------------------------- precision


@pytest.fixture
def ieee_convolutions():
    place = torch.backends.cudnn.conv
    before = place.fp32_precision
    place.fp32_precision = "ieee"
    yield place
    place.fp32_precision = before


@pytest.mark.parametrize("way", WAYS)
def test_precision_set_by_the_user_is_restored(way, ieee_convolutions) -> None:
    WAYS[way](make("mlp"), pair())
    assert ieee_convolutions.fp32_precision == "ieee"


@pytest.mark.parametrize("amp", [False, True])
def test_an_autocast_around_the_call_changes_nothing(amp) -> None:
    net, teacher = make("resnet"), make("resnet")
    other, settings = copy.deepcopy(net), dataclasses.replace(SMALL, amp=amp)
    Finetuner(net, pair(), settings, teacher).run(step=0)
    with torch.autocast("cpu", torch.bfloat16):
        Finetuner(other, pair(), settings, teacher).run(step=0)
    assert_same(weights(net), weights(other))


def test_mixed_precision_equals_a_plain_loop_with_autocast() -> None:
    net, data = make("resnet"), pair()
    plain = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(plain.parameters(), SMALL.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SMALL.epochs)
    for epoch in range(SMALL.epochs):
        for x, labels, _, _ in data.train_batches(16, seed=0, step=0, epoch=epoch, padding=1):
            with torch.autocast("cpu", torch.bfloat16):
                logits = plain(x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
        schedule.step()
    before, after = weights(make("resnet")), weights(plain)
    Finetuner(net, data, dataclasses.replace(SMALL, amp=True)).run(step=0)
    for key in ("7.weight", "4.conv2.weight"):
        moved = (after[key] - before[key]).abs().max()
        assert (weights(net)[key] - after[key]).abs().max() < 0.1 * moved, key
