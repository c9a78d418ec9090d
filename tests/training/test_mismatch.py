"""The activation mismatch; that training with it equals a plain loop is in test_finetune.py."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import Finetune, Finetuner
from fastbcd.training.mismatch import direction, mismatch, site_outputs, sites_of
from helpers.nets import images, make, thinned
from helpers.train_cases import SMALL, assert_same, pair, weights

MATCHED = dataclasses.replace(SMALL, mismatch=0.7)


def test_gradients_are_those_of_the_formula() -> None:
    """In float64, also in channels_last memory."""
    a, t = torch.randn(2, 4, 3, 5, 5, dtype=torch.float64).unbind()
    a = a.contiguous(memory_format=torch.channels_last).requires_grad_()
    found = mismatch([a, 2 * a], [direction(t), direction(-t)])
    truth = sum(
        (b / b.norm() - v / v.norm()).norm() / 4
        for sign, times in ((1, 1), (-1, 2))
        for b, v in zip(times * a, sign * t, strict=True)
    )
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, truth)
    torch.testing.assert_close(*(torch.autograd.grad(loss, a)[0] for loss in (found, truth)))


def test_samples_without_a_direction_and_equal_ones_have_no_gradient() -> None:
    a = torch.zeros(2, 3, requires_grad=True)
    given = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    with torch.no_grad():
        a[1] = 1
    loss = mismatch([a, given + 0 * a], [direction(given), direction(given)])
    assert loss.item() == pytest.approx(1.0)  # of a zero and a unit vector, twice, over two samples
    (gradient,) = torch.autograd.grad(loss, a)
    assert torch.equal(gradient[0], torch.zeros(3))
    assert gradient.isfinite().all()


def test_a_teacher_that_is_not_converted() -> None:
    """Its ReLUs are found by `convert`; it stays as it is."""
    x, labels = images(40)
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    results = []
    for other in (teacher, fastbcd.convert(teacher, x)):
        net = thinned(fastbcd.convert(teacher, x))
        Finetuner(net, (x, labels), MATCHED, other).run(step=0)
        results.append(weights(net))
    assert_same(*results)
    assert isinstance(teacher[1], nn.ReLU)


def test_it_brings_the_activations_nearer_to_the_teachers() -> None:
    net, teacher, x = thinned(make("resnet")), make("resnet").eval(), images(16)[0]
    found = []
    for weight in (0.0, 5.0):
        tuned = copy.deepcopy(net)
        s = dataclasses.replace(SMALL, mismatch=weight, distill=0.0, epochs=4, lr=0.05)
        Finetuner(tuned, pair(), s, teacher).run(step=0)
        with (
            torch.no_grad(),
            site_outputs(sites_of(teacher), direction) as t,
            site_outputs(sites_of(tuned)) as a,
        ):
            teacher(x)
            tuned.eval()(x)
        found.append(float(mismatch(a, t)))
        assert not any(module._forward_hooks for module in tuned.modules())
    assert found[1] < found[0]


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_trains_about_the_same(amp) -> None:
    losses = []
    for mode in (False, amp):
        net = thinned(make("mlp"))
        s = dataclasses.replace(MATCHED, amp=mode)
        losses.append(Finetuner(net, pair(), s, make("mlp")).run(step=0)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_what_cannot_be_compared_is_refused() -> None:
    net = make("mlp")
    with pytest.raises(ValueError, match=r"mismatch=0\.7 needs a teacher: give one"):
        Finetuner(net, pair(), MATCHED)
    with pytest.raises(ValueError, match="the teacher belongs to another network: site 0 is"):
        Finetuner(net, pair(), MATCHED, make("resnet"))
    with pytest.raises(ValueError, match=r"mismatch=1\.0 needs compile=False"):
        Finetune(mismatch=1.0, compile=True)
    with pytest.raises(ValueError, match="the net called 2 masked activations and the teacher 1"):
        mismatch([torch.ones(1, 2)] * 2, [torch.ones(1, 2)])
