"""bcd, steps, saliency and fine-tuning with a metric and a loss of the user's."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastbcd
from fastbcd import Finetune, Finetuner, MaskedReLU
from helpers.nets import images, make
from helpers.run_cases import contents, records
from helpers.shapes import NO_VIEWS, pixel_accuracy, pixel_loss, segmentation_run, shapes, small_net

HELPERS = Path(__file__).parent.parent / "helpers"
KILLED = """
import os, signal, sys
import torch
from fastbcd.runs.directory import RunDirectory
from helpers.shapes import segmentation_run

write = RunDirectory.write

def dies_after_two(self, state):
    write(self, state)
    if len(state.history) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

RunDirectory.write = dies_after_two
torch.set_num_threads(int(sys.argv[1]))
segmentation_run(sys.argv[2])
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("segmentation") / "whole"
    return segmentation_run(run_dir), run_dir


def test_a_segmentation_net_is_linearised(whole) -> None:
    run, run_dir = whole
    assert run.masks.count() == 552
    assert [step.after for step in run.history] == [1002, 852, 702, 552]
    x, maps = shapes(8)
    with torch.no_grad():
        expected = 100 * pixel_accuracy(run.model.eval()(x), maps).mean()
    assert run.history[-1].test_accuracy == pytest.approx(float(expected), abs=1e-9)
    assert all(0 < step.base_accuracy <= 100 for step in run.history)
    assert repr(run).endswith(" %)")
    settings = json.loads((run_dir / "config.json").read_text())["settings"]
    assert settings["metric"] == "function helpers.shapes.pixel_accuracy"
    assert settings["loss"] == "function helpers.shapes.pixel_loss"
    assert "loss" not in settings["proposal"]


def test_a_killed_run_resumes_to_the_same_bits(whole, tmp_path) -> None:
    run_dir = tmp_path / "killed"
    threads = str(torch.get_num_threads())
    child = [sys.executable, "-c", KILLED, threads, str(run_dir)]
    ended = subprocess.run(child, cwd=HELPERS.parent, timeout=600, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(records(run_dir)) == 2
    assert len(segmentation_run(run_dir).history) == 4
    assert contents(run_dir) == contents(whole[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": None}, "the net must return logits"),
        ({"metric": lambda logits, maps: pixel_accuracy(logits, maps)}, r"metric is"),
        ({"loss": None}, r"loss is .*pixel_loss. there and null now"),
    ],
)
def test_another_metric_or_loss_does_not_resume(whole, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        segmentation_run(whole[1], **options)


class Score:
    """A metric with a name of its own, in its own units."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def describe(self) -> dict[str, float]:
        return {"scale": self.scale}

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        return -self.scale * (outputs["value"].flatten(1) - targets).abs().mean(1)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(12, 20), MaskedReLU(20))
        self.value, self.other = nn.Linear(20, 2), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x)
        return {"value": self.value(x), "other": self.other(x)}


def absolute(outputs: Any, targets: Tensor) -> Tensor:
    """The mean over the batch."""
    return (outputs["value"] - targets).abs().mean()


def regression(run_dir: Any = None, scale: float = 10.0, **options: Any) -> fastbcd.Run:
    torch.manual_seed(0)
    data = torch.randn(40, 3, 2, 2), torch.randn(40, 2)
    return fastbcd.bcd(
        TwoHeads(), data, 5, drc=5, rt=3, adt=0.01, metric=Score(scale), loss=absolute, test=data,
        finetune=Finetune(epochs=1, batch_size=20, **NO_VIEWS), run_dir=run_dir, **options,
    )  # fmt: skip


def test_regression_with_a_dict_of_outputs(tmp_path) -> None:
    run = regression(tmp_path)
    assert run.masks.count() == 5
    last = run.history[-1]
    assert last.test_accuracy is not None
    assert last.test_accuracy < 0, "in the metric's own units"
    assert "%" not in repr(run) + str(last)
    assert "%" not in repr(regression(tmp_path)), "also after it is read"
    with pytest.raises(ValueError, match=r"metric\.scale is 10\.0 there and 20\.0 now"):
        regression(tmp_path, 20.0)


def test_the_fine_tuning_takes_the_loss() -> None:
    """One batch of SGD is a step against the gradient of the loss; [B] counts as its mean."""
    torch.manual_seed(0)
    x, targets, net = torch.randn(8, 3, 2, 2), torch.randn(8, 2), TwoHeads().double()
    settings = Finetune(epochs=1, lr=0.1, momentum=0.0, weight_decay=0.0, batch_size=8, **NO_VIEWS)
    mine, each = copy.deepcopy(net), copy.deepcopy(net)
    absolute(mine(x.double()), targets).backward()
    with torch.no_grad():
        for p in mine.parameters():
            p -= 0 if p.grad is None else 0.1 * p.grad

    def per_sample(outputs: Any, targets: Tensor) -> Tensor:
        return (outputs["value"] - targets).abs().mean(1)

    for tuned, loss in ((net, absolute), (each, per_sample)):
        Finetuner(tuned, (x, targets), settings, loss=loss).run(step=0)
        for name, p in mine.named_parameters():
            torch.testing.assert_close(tuned.get_parameter(name), p, rtol=1e-9, atol=1e-12)


def test_multi_label_and_tuples() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(12, 20), MaskedReLU(20))
            self.head = nn.Linear(20, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.head(y := self.net(x)), y

    def exact(outputs: Any, targets: Tensor) -> Tensor:
        return ((outputs[0] > 0) == (targets > 0.5)).double().mean(1)

    def bce(outputs: Any, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs[0], targets.to(outputs[0]))

    torch.manual_seed(0)
    data = torch.randn(40, 3, 2, 2), (torch.rand(40, 4) < 0.5).float()
    tuned = Finetune(epochs=1, batch_size=20, padding=0)
    run = fastbcd.bcd(Pair(), data, 5, drc=8, rt=2, metric=exact, loss=bce, finetune=tuned)
    assert run.masks.count() == 5
    with pytest.raises(ValueError, match=r"the teacher Pair cannot be distilled from: that needs"):
        fastbcd.bcd(Pair(), data, 5, metric=exact, loss=bce, finetune=tuned, teacher=Pair())
    with pytest.raises(ValueError, match="pass loss=, a callable"):
        fastbcd.bcd(Pair(), data, 5, metric=exact, finetune=tuned)


def test_the_saliency_of_a_loss_is_its_first_order_effect() -> None:
    """Twice the loss has twice the saliency, and cross-entropy given as a loss changes nothing."""
    net, data = make("mlp"), images(30)
    given = fastbcd.saliency(net, data)
    same = fastbcd.saliency(net, data, loss=lambda logits, y: F.cross_entropy(logits.double(), y))
    twice = fastbcd.saliency(
        net, data,
        loss=lambda logits, y: 2 * F.cross_entropy(logits.double(), y, reduction="none"),
    )  # fmt: skip
    kept = fastbcd.masks(net).bits
    torch.testing.assert_close(same, given)
    torch.testing.assert_close(twice[kept], 2 * given[kept])


def test_accuracy_as_a_metric_gives_the_run_of_the_default(tmp_path) -> None:
    """The same choices, weights and history, except the engine's early ends."""

    def top1(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.argmax(1) == labels).double()

    top1.bounds = (0, 1)  # type: ignore[attr-defined]
    data = images(40)
    runs = [
        fastbcd.bcd(make("mlp"), data, 4, drc=8, rt=3, adt=1.0, metric=metric, test=data,
                    finetune=Finetune(epochs=1, batch_size=16, padding=1), proposal="saliency")
        for metric in (None, top1)
    ]  # fmt: skip
    for one, other in zip(*(run.history for run in runs), strict=True):
        assert one.test_accuracy == pytest.approx(other.test_accuracy)
        assert one.chosen_accuracy == pytest.approx(other.chosen_accuracy)
    assert runs[0].masks == runs[1].masks


def test_distillation_on_maps_is_a_mean_over_pixels() -> None:
    """Against the formula, for one batch."""
    x, maps = shapes(8)
    net, teacher = small_net().double(), small_net().double()
    with torch.no_grad():
        for p in teacher.parameters():
            p += 0.1
    settings = Finetune(epochs=1, lr=0.0, batch_size=8, temperature=2.0, distill=0.5, **NO_VIEWS)
    found = Finetuner(net, (x, maps), settings, teacher, loss=pixel_loss).run(step=0)["loss"]
    student, given = net.train()(x.double()), teacher.eval()(x.double())
    p, q = (F.log_softmax(t / 2, 1) for t in (given, student))
    divergence = (p.exp() * (p - q)).sum(1).mean()
    expected = pixel_loss(student, maps).mean() + 0.5 * 4 * divergence
    assert found == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": 3}, "metric=3; it must be a callable"),
        ({"metric": lambda logits, maps: logits.mean()}, r"one value per sample, a tensor \[2\]"),
        ({"loss": lambda logits, maps: logits}, "the loss returns float32"),
        ({"finetune": Finetune(epochs=1)}, "would move the images but not their targets"),
    ],
)
def test_bad_input_is_refused_before_any_work(options, message, tmp_path) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        segmentation_run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
