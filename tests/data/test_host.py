"""HostData: the same batches and results as ImageData, in less of the GPU's memory."""

from __future__ import annotations

import pytest
import torch

import fastbcd
from fastbcd import Finetune
from fastbcd.data.for_net import data_for
from fastbcd.data.host import HostData
from fastbcd.data.sources import as_data
from helpers import fake_cuda
from helpers.nets import images, make


@pytest.fixture
def pair(gpu):
    """A part of some data, on the GPU and on the host."""
    data = as_data(images(50)).subset(list(range(3, 45)))
    return data.to("cuda"), HostData(data, "cuda")


def test_batches_are_those_of_image_data(gpu, pair) -> None:
    there, host = pair
    for data in ((there, host), (there.first(20), host.first(20)), (there.rest(7), host.rest(7))):
        for a, b in zip(*(d.batches(8) for d in data), strict=True):
            assert all(map(torch.equal, a, b))
            assert {t.device.type for t in b} == {"cuda"}
    parts = [d.shard(1, 3).subset([5, 0, 2]) for d in pair]
    options = {"seed": 0, "step": 1, "epoch": 2, "padding": 1, "rank": 1, "world": 2}
    for d, e in ((there, host), parts):
        for a, b in zip(*(x.train_batches(4, **options) for x in (d, e)), strict=True):
            assert all(map(torch.equal, a, b))
    indices = torch.tensor([4, 1], device="cuda")
    assert torch.equal(*(d.views(indices, indices, padding=1) for d in pair))
    assert torch.equal(host.to("cpu").images, there.to("cpu").images)
    assert host.to("cuda:1").device.index == 1
    assert host.to("cuda") is host
    for name, value in there.identity(10).items():
        assert torch.equal(host.identity(10)[name].cpu(), value.cpu())
    assert "42 × 3×8×8" in repr(host)


def test_an_epoch_reads_its_order_once(gpu, pair) -> None:
    _, host = pair
    options = {"seed": 0, "step": 0, "epoch": 0, "padding": 1}
    counts = []
    for size in (4, 21):
        gpu.reset()
        list(host.train_batches(size, **options))
        list(host.batches(size))
        counts.append((gpu.counts["sync"], gpu.counts["d2h"]))
    assert counts[0] == counts[1]


def test_images_that_do_not_fit_stay_on_the_host() -> None:
    """BCD on a GPU with less memory than the images need goes as on the CPU."""
    data = as_data(images(1000))
    tune = Finetune(epochs=1, padding=1, batch_size=100, amp=False)
    options = {"drc": 5, "rt": 2, "finetune": tune}
    expected = fastbcd.bcd(make("mlp"), data, 40, teacher=make("mlp"), **options)
    with fake_cuda.device(memory=int(0.9 * data.images.nbytes)):
        net, teacher = make("mlp").cuda(), make("mlp").cuda()
        assert type(data_for(net, data)) is HostData
        found = fastbcd.bcd(net, data, 40, teacher=teacher, **options)
        assert found.masks == expected.masks
        for a, b in zip(found.history, expected.history, strict=True):
            assert a.train_loss == pytest.approx(b.train_loss, rel=1e-4)
    with fake_cuda.device():
        assert type(data_for(make("mlp").cuda(), data)) is fastbcd.ImageData
