"""TeacherLogits: equal to the teacher's forward pass, each view computed once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastbcd
from fastbcd import Finetune, Finetuner
from fastbcd.runtime import warn_once
from fastbcd.training.teacher import BATCH, TeacherLogits
from helpers import fake_cuda
from helpers.nets import make
from helpers.train_cases import SMALL, assert_same, pair, weights


def test_teacher_logits_are_those_of_its_forward() -> None:
    data, teacher = pair(50), make("resnet")
    cache = TeacherLogits(teacher, data, Finetune(padding=1))
    for epoch in range(6):
        views = data.view_ids(seed=0, step=0, epoch=epoch, padding=1)
        with torch.no_grad():
            truth = teacher(data.views(torch.arange(50), views, padding=1))
        torch.testing.assert_close(cache.epoch(views), truth)
        assert torch.equal(cache.epoch(views), cache.epoch(views))
    epochs = [data.view_ids(seed=0, step=0, epoch=e, padding=1).tolist() for e in range(6)]
    different = {(sample, view) for views in epochs for sample, view in enumerate(views)}
    assert cache.computed == cache.cache.used == len(different), "each view once"


@pytest.mark.parametrize("name", ["resnet", "mlp", "dense"])
def test_a_lookup_does_not_depend_on_what_is_cached(name) -> None:
    data, teacher = pair(BATCH + 30), make(name)
    views = [data.view_ids(seed=0, step=0, epoch=e, padding=1) for e in range(4)]
    cold = [TeacherLogits(teacher, data, Finetune(padding=1)).epoch(v) for v in views]
    warm = TeacherLogits(teacher, data, Finetune(padding=1))
    for v, truth in zip(views, cold, strict=True):
        mixed = torch.where(torch.arange(len(v)) % 3 == 0, v, views[-1])
        warm.epoch(mixed)
        assert torch.equal(warm.epoch(v), truth)


class Neighbours(nn.Module):
    """A teacher whose logits for an image depend on its place in the batch."""

    def forward(self, x):
        return x.flatten(1)[:, :5] + 1e-6 * torch.arange(x.size(0)).unsqueeze(1)


def test_a_teacher_with_dependent_rows_sees_images_one_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(warn_once, "_issued", set())
    data = pair(20)
    cache = TeacherLogits(Neighbours(), data, Finetune(padding=1))
    views = data.view_ids(seed=0, step=0, epoch=0, padding=1)
    with pytest.warns(RuntimeWarning, match="1 at a time"):
        logits = cache.epoch(views)
    truth = data.views(torch.arange(20), views, padding=1).flatten(1)[:, :5]
    assert torch.equal(logits, truth)


@pytest.mark.parametrize("limit", [0, 50 * 18 * 4 + 77 * 20])
def test_a_limited_cache_is_exact_and_warns_once(limit, recwarn) -> None:
    data, teacher = pair(50), make("mlp")
    full = TeacherLogits(teacher, data, Finetune(padding=1))
    cache = TeacherLogits(teacher, data, Finetune(padding=1, teacher_cache=limit))
    for epoch in range(4):
        views = data.view_ids(seed=0, step=0, epoch=epoch, padding=1)
        assert torch.equal(cache.epoch(views), full.epoch(views))
    assert cache.cache.used == (77 if limit else 0)
    assert cache.computed > full.computed
    said = [str(w.message) for w in recwarn if "teacher_cache" in str(w.message)]
    assert len(said) == 1
    assert f"{cache.cache.used}" in said[0]


def test_the_teacher_is_not_changed() -> None:
    net, teacher = make("mlp"), make("mlp").train()
    before = weights(teacher)
    tuner = Finetuner(net, pair(), SMALL, teacher)
    tuner.run(step=0)
    assert teacher.training
    assert_same(before, weights(teacher))


def test_images_of_one_channel_are_batched(recwarn) -> None:
    """Its strides are ambiguous: they must be the same in every batch."""
    data = fastbcd.load("fashion-mnist-mini").first(40)
    torch.manual_seed(0)
    teacher = fastbcd.models.resnet20(10, 28, 1, width=8, blocks=1)
    logits = TeacherLogits(teacher, data, Finetune(padding=1, flip=False))
    logits.epoch(torch.zeros(40, dtype=torch.int64))
    assert logits.batch == BATCH
    assert not recwarn.list


def test_batches_are_halved_when_the_memory_of_the_gpu_is_full() -> None:
    """It is reported once, and the logits are the same."""
    data, teacher = pair(BATCH), make("resnet")
    views = data.view_ids(seed=0, step=0, epoch=0, padding=1)
    truth = TeacherLogits(teacher, data, Finetune(padding=1)).epoch(views)
    with fake_cuda.device() as gpu:
        logits = TeacherLogits(teacher.cuda(), data.to("cuda"), Finetune(padding=1))
        gpu.memory = gpu.allocated[0] + 3 * data.images.nbytes
        with pytest.warns(RuntimeWarning, match="at a time: CUDA out of memory") as said:
            found = logits.epoch(views)
        assert len(said) == 1
        assert 1 < logits.batch < BATCH
        torch.testing.assert_close(found.cpu(), truth)
        assert torch.equal(logits.epoch(views).cpu(), found.cpu())
        gpu.memory = gpu.allocated[0] + 1000
        with pytest.raises(torch.OutOfMemoryError):
            logits.epoch((views + 1) % 18)


def test_an_epochs_logits_are_copied_at_once(gpu) -> None:
    copies = []
    for n in (BATCH, 4 * BATCH):
        data = pair(n).to("cuda")
        logits = TeacherLogits(make("mlp").cuda(), data, Finetune(padding=1))
        views = data.view_ids(seed=0, step=0, epoch=0, padding=1)
        gpu.reset()
        logits.epoch(views)
        copies.append(gpu.counts["d2h"])
    assert copies[0] == copies[1], gpu.places
