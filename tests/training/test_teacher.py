"""TeacherLogits: equal to the teacher's forward pass, each view computed once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fastbcd
from fastbcd import Finetune, Finetuner, ImageData
from fastbcd.runtime import warn_once
from fastbcd.training.teacher import BATCH, TeacherLogits
from helpers.nets import make
from helpers.train_cases import SMALL, assert_same, pair, weights

PADDED = Finetune(padding=1)


def views_of(data: ImageData, epoch: int = 0) -> Tensor:
    return data.view_ids(seed=0, step=0, epoch=epoch, padding=1)


def everyone(data: ImageData) -> Tensor:
    return torch.arange(len(data))


def test_teacher_logits_are_those_of_its_forward() -> None:
    data = pair(50)
    teacher = make("resnet")
    cached = TeacherLogits(teacher, data, PADDED)
    seen = set()
    for epoch in range(6):
        views = views_of(data, epoch)
        with torch.no_grad():
            expected = teacher(data.views(everyone(data), views, padding=1))
        torch.testing.assert_close(cached.epoch(views, everyone(data)), expected)
        again = cached.epoch(views, everyone(data))
        assert torch.equal(cached.epoch(views, everyone(data)), again)
        seen |= set(enumerate(views.tolist()))
    assert cached.computed == int(cached.known.sum()) == len(seen), "each view once"


@pytest.mark.parametrize("name", ["resnet", "mlp", "dense"])
def test_a_lookup_does_not_depend_on_what_is_cached(name) -> None:
    data = pair(BATCH + 30)
    teacher = make(name)
    every_view = [views_of(data, epoch) for epoch in range(4)]
    warm = TeacherLogits(teacher, data, PADDED)
    for views in every_view:
        cold = TeacherLogits(teacher, data, PADDED).epoch(views, everyone(data))
        mixed = torch.where(everyone(data) % 3 == 0, views, every_view[-1])
        warm.epoch(mixed, everyone(data))
        assert torch.equal(warm.epoch(views, everyone(data)), cold)


@pytest.mark.parametrize(("amp", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_the_teacher_is_folded_and_runs_in_the_precision_of_the_training(amp, dtype) -> None:
    teacher, data = make("resnet").eval(), pair(20)
    net = TeacherLogits(teacher, data, Finetune(padding=1, amp=amp)).net
    assert not any(isinstance(module, nn.BatchNorm2d) for module in net.model.modules())
    layers = [m for m in net.model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert {layer.weight.dtype for layer in layers} == {dtype}
    x, _ = next(data.batches(20))
    with torch.no_grad():
        expected = teacher(x)
    error = (net.of(x).logits - expected).abs().max() / expected.abs().max()
    assert error < 20 * torch.finfo(dtype).eps
    assert net.of(x).logits.dtype == torch.float32


class Neighbours(nn.Module):
    """A teacher whose logits for an image depend on its place in the batch."""

    def forward(self, x):
        return x.flatten(1)[:, :5] + 1e-6 * torch.arange(x.size(0)).unsqueeze(1)


def test_a_teacher_with_dependent_rows_runs_in_every_batch(monkeypatch) -> None:
    monkeypatch.setattr(warn_once, "_issued", set())
    with pytest.warns(RuntimeWarning, match="the teacher runs in every batch"):
        logits = TeacherLogits(Neighbours(), pair(20), PADDED)
    answer_of = logits.answers(seed=0, step=0, epoch=0, images=20)
    batch = torch.randn(7, 3, 8, 8)
    assert torch.equal(answer_of(batch, torch.arange(7)).logits, Neighbours()(batch))
    assert logits.computed == 0


@pytest.mark.parametrize("samples", [0, 20])
def test_a_limited_cache_is_exact_and_warns(samples) -> None:
    data = pair(50)
    teacher = make("mlp")
    full = TeacherLogits(teacher, data, PADDED)
    limit = samples * 18 * (5 * 4 + 1)  # views, logits and a mark
    with pytest.warns(RuntimeWarning, match=f"teacher_cache allows {samples} samples"):
        limited = TeacherLogits(teacher, data, Finetune(padding=1, teacher_cache=limit))
    for epoch in range(4):
        views = views_of(data, epoch)
        expected = full.epoch(views, everyone(data))
        assert torch.equal(limited.epoch(views, everyone(data)), expected)
    assert limited.cache.nbytes <= limit
    assert limited.computed > full.computed


def test_the_teacher_is_not_changed() -> None:
    teacher = make("mlp").train()
    before = weights(teacher)
    Finetuner(make("mlp"), pair(), SMALL, teacher).run(step=0)
    assert teacher.training
    assert_same(before, weights(teacher))


def test_a_teacher_that_is_not_finite_is_named() -> None:
    teacher = make("mlp")
    with torch.no_grad():
        teacher.get_parameter("5.bias")[0] = torch.inf
    with pytest.raises(FloatingPointError, match="teacher gives non-finite logits for sample 0"):
        Finetuner(make("mlp"), pair(), SMALL, teacher).run(step=0)


def test_images_of_one_channel_are_batched(recwarn) -> None:
    """Its strides are ambiguous: they must be the same in every batch."""
    data = fastbcd.load("fashion-mnist-mini").first(40)
    torch.manual_seed(0)
    teacher = fastbcd.models.resnet20(10, 28, 1, width=8, blocks=1)
    logits = TeacherLogits(teacher, data, Finetune(padding=1, flip=False))
    assert logits.known is not None
    assert not recwarn.list


def test_an_epochs_logits_are_copied_at_once(gpu) -> None:
    copies = []
    for count in (BATCH, 4 * BATCH):
        data = pair(count).to("cuda")
        logits = TeacherLogits(make("mlp").cuda(), data, PADDED)
        gpu.reset()
        logits.epoch(views_of(data), everyone(data))
        copies.append(gpu.counts["d2h"])
    assert copies[0] == copies[1], gpu.places


def test_a_part_of_an_epoch_needs_the_teacher_for_that_part_alone() -> None:
    settings = Finetune(epochs=0.4, batch_size=16, padding=1)  # one batch of three
    tuner = Finetuner(make("resnet"), pair(40), settings, make("resnet"))
    parts = []
    for step in range(2):
        known = tuner.teacher.known.clone()
        tuner.run(step)
        parts.append((tuner.teacher.known & ~known).any(1).nonzero().flatten().tolist())
    assert [len(part) for part in parts] == [16, 16]
    assert parts[0] != parts[1], "each step has another part"
    tuner.run(step=1, epochs=1.4)
    assert tuner.teacher.computed <= 16 + 40 + 16, "the first batch is cached"
