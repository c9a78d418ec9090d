"""Images in a mapped file, or on the host beside a GPU, give the batches of those in memory."""

from __future__ import annotations

import json
import resource
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.utils.data import TensorDataset

import fastbcd
from fastbcd import Finetune, ImageData
from fastbcd.data import images as image_data
from fastbcd.data.for_net import data_for
from fastbcd.data.packed import FORMAT
from fastbcd.data.sources import as_data
from helpers import fake_cuda
from helpers.nets import images, make

EPOCH = {"seed": 0, "step": 1, "epoch": 2, "padding": 1}


def mapped(folder, x, labels) -> ImageData:
    fastbcd.pack(TensorDataset(x, labels), folder, progress=False)
    return ImageData.open(folder)


@pytest.fixture(params=["mapped", "mapped beside a GPU", "host beside a GPU"])
def pair(request, tmp_path, monkeypatch):
    """The same data in memory, and where the parameter says."""
    x, labels = images(50)
    memory = as_data((x, labels))
    other = memory
    if request.param.startswith("mapped"):
        other = mapped(tmp_path / "packed", x, labels)
    if not request.param.endswith("GPU"):
        yield memory, other
        return
    with fake_cuda.device():
        gpu = memory.to("cuda")
        monkeypatch.setattr(image_data, "default_memory", lambda device: 1000)
        yield gpu, other.to("cuda")


def same(batches, others) -> None:
    for batch, other in zip(batches, others, strict=True):
        assert all(map(torch.equal, batch, other))
        assert all(one.device == two.device for one, two in zip(batch, other, strict=True))


def test_batches_are_those_of_memory(pair) -> None:
    memory, other = pair
    assert other.device == memory.device
    assert other.images.device.type == "cpu"
    picks = [40, 3, 3, 21, 8, 17, 30]
    parts = [
        lambda data: data,
        lambda data: data.first(20),
        lambda data: data.rest(7).shard(1, 3),
        lambda data: data.subset(picks),
        lambda data: data.subset(picks).rest(1).subset([4, 0, 2]),
        lambda data: data.shard(1, 2).subset([]),
    ]
    for part in parts:
        one = part(memory)
        two = part(other)
        assert len(one) == len(two)
        same(one.batches(8), two.batches(8))
        same(one.train_batches(4, **EPOCH), two.train_batches(4, **EPOCH))
        for name, tensor in one.identity(10).items():
            assert torch.equal(tensor.cpu(), two.identity(10)[name].cpu())
    split = {"rank": 1, "world": 2}
    same(memory.train_batches(8, **EPOCH, **split), other.train_batches(8, **EPOCH, **split))
    where = torch.tensor([4, 1], device=memory.device)
    assert torch.equal(memory.views(where, where, padding=1), other.views(where, where, padding=1))
    back = other.subset(picks).to("cpu")
    same(back.batches(8), memory.subset(picks).to("cpu").batches(8))


def test_images_that_fit_go_to_the_gpu(gpu, tmp_path) -> None:
    x, labels = images(50)
    memory = as_data((x, labels))
    packed = mapped(tmp_path / "packed", x, labels)
    for data in (memory, packed):
        moved = data.to("cuda")
        assert moved.images.device.type == "cuda"
        assert moved.to("cuda:0") is moved
        assert moved.to("cuda:1").images.device.index == 1


def test_an_epoch_reads_its_order_once(gpu, monkeypatch) -> None:
    monkeypatch.setattr(image_data, "default_memory", lambda device: 1000)
    data = as_data(images(42)).to("cuda")
    assert data.images.device.type == "cpu"
    counts = []
    for size in (4, 21):
        gpu.reset()
        list(data.train_batches(size, **EPOCH))
        list(data.batches(size))
        counts.append((gpu.counts["sync"], gpu.counts["d2h"]))
    assert counts[0] == counts[1]


def test_images_beside_a_gpu_are_read_ahead_by_one_thread(gpu, monkeypatch) -> None:
    """While a batch is in use the next one is read; later passes use the same thread."""
    monkeypatch.setattr(image_data, "default_memory", lambda device: 1000)
    data = as_data(images(40)).to("cuda")
    reads = []
    gather = torch.index_select

    def noted(*args, out):
        assert out.pinned
        reads.append(threading.get_ident())
        return gather(*args, out=out)

    monkeypatch.setattr(torch, "index_select", noted)
    for batches in (data.batches(10), data.train_batches(10, **EPOCH)):
        reads.clear()
        for number, _ in enumerate(batches, 2):
            wait_for(lambda number=number: len(reads) >= min(number, 4))
            assert len(reads) == min(number, 4), "one ahead, and no more"
        assert threading.get_ident() not in reads
    readers = [t for t in threading.enumerate() if t.name.startswith("fastbcd images")]
    assert len(readers) == 1


def wait_for(condition) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 600
        time.sleep(0.001)


def test_a_part_that_fits_is_copied_to_the_gpu_once(gpu, monkeypatch) -> None:
    """So what is scored again and again is not copied again."""
    data = as_data(images(1000))
    monkeypatch.setattr(image_data, "default_memory", lambda device: data.images.nbytes)
    whole = data.to("cuda")
    part = whole.first(100)
    assert whole.images.device.type == "cpu"
    assert part.images.device.type == "cuda"
    gpu.reset()
    list(part.batches(10))
    once = gpu.counts["h2d"]
    list(part.batches(5))
    assert gpu.counts["h2d"] == once
    run = fastbcd.bcd(make("mlp").cuda(), whole, 48, drc=2, rt=2, samples=100, finetune=None)
    assert run.history[0].engine


def test_bcd_beside_a_small_gpu_goes_as_on_the_cpu() -> None:
    data = as_data(images(1000))
    tune = Finetune(epochs=1, padding=1, batch_size=100, amp=False)
    options = {"drc": 5, "rt": 2, "finetune": tune}
    expected = fastbcd.bcd(make("mlp"), data, 40, teacher=make("mlp"), **options)
    with fake_cuda.device(memory=int(1.6 * data.images.nbytes)):
        net = make("mlp").cuda()
        assert data_for(net, data).images.device.type == "cpu"
        run = fastbcd.bcd(net, data, 40, teacher=make("mlp").cuda(), **options)
        assert run.masks == expected.masks
        for step, other in zip(run.history, expected.history, strict=True):
            assert step.train_loss == pytest.approx(other.train_loss, rel=1e-4)


def test_a_run_on_mapped_images_is_that_on_images_in_memory(tmp_path) -> None:
    """With the teacher's cache and a confidence; and it resumes wherever the images are."""
    x, labels = images(60)
    packed = mapped(tmp_path / "packed", x, labels)
    tune = Finetune(epochs=2, padding=1, batch_size=16)
    options = {"drc": 5, "rt": 2, "finetune": tune, "confidence": 0.9}
    budget = fastbcd.masks(make("mlp")).count() - 10
    runs = []
    for folder, data in (("one", (x, labels)), ("two", packed), ("two", (x, labels))):
        more = {**options, "teacher": make("mlp"), "test": data, "run_dir": tmp_path / folder}
        runs.append(fastbcd.bcd(make("mlp"), data, budget, **more))
    memory, other, resumed = runs
    assert resumed.masks == other.masks
    assert other.masks == memory.masks
    for one, two in zip(memory.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert [step.images for step in memory.history] == [step.images for step in other.history]


def test_large_data_takes_constant_memory(tmp_path) -> None:
    """30 GB of images, as a file of holes: only those of the batches are read."""
    count = 200_000
    with open(tmp_path / "images.bin", "wb") as file:
        file.truncate(count * 3 * 224 * 224)
    arrays = {
        "labels": np.arange(count) % 1000,
        "like": np.empty((0, 3, 224, 224), np.uint8),
        "mean": np.full(3, 0.5),
        "std": np.full(3, 0.25),
    }
    notes = {"format": FORMAT, "classes": json.dumps(1000)}
    save_file(arrays, tmp_path / "meta.safetensors", notes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = ImageData.open(tmp_path)
    assert repr(data) == "ImageData(200000 × 3×224×224 uint8, 1000 classes, cpu)"
    part = data.first(10**5).shard(1, 2)
    assert len(next(part.batches(100))[1]) == 100
    assert len(next(part.train_batches(100, **EPOCH))[1]) == 100
    assert len(part.identity(50)["images"]) < 102
    assert len(data.subset(torch.randperm(count)[:100])) == 100
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 1 << 30
