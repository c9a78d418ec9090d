"""StreamData: data that does not fit into memory gives the results of data that does."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler

import fastbcd
from fastbcd import Finetune, StreamData
from fastbcd.data import sources
from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data

HELD = 40  # items of a Large that may be alive at once


class Large(Dataset):
    """Images that are made when they are read. It counts its reads, and refuses to be held."""

    def __init__(self, images, labels, transform=lambda x: x):
        self.images, self.labels, self.transform = images, labels, transform
        self.reads: list[int] = []
        self.alive = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        self.reads.append(i)
        image = self.transform(self.images[i].copy()).view(Item)
        image.owner = self
        self.alive += 1
        if self.alive > HELD:
            raise MemoryError(f"{self.alive} items are held at once")
        return image, self.labels[i]


class Item(np.ndarray):
    owner: Large | None = None

    def __del__(self):
        if self.owner is not None:
            self.owner.alive -= 1


def large(n=120, **options):
    rng = np.random.default_rng(0)
    images = rng.standard_normal((n, 3, 6, 6), dtype=np.float32)
    return Large(images, (images.mean((1, 2, 3)) > 0).astype(np.int64).tolist(), **options)


@pytest.fixture
def small_memory(monkeypatch):
    monkeypatch.setattr(sources, "default_memory", lambda device: 10_000)


def net():
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), fastbcd.MaskedReLU((4, 6, 6))
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(144, 2))


def held(data):
    """The same data in memory."""
    return torch.from_numpy(data.images), torch.tensor(data.labels)


def test_what_does_not_fit_is_streamed(small_memory, capsys):
    data = large()
    for given in (data, DataLoader(data, 7, shuffle=True), Subset(data, range(120))):
        stream = as_data(given)
        assert type(stream) is StreamData
        assert stream.where.startswith("streamed from ")
    assert len(data.reads) < 60
    fastbcd.score(net(), torch.tensor([[0]]), data, explain=True)
    assert "3×6×6 float32" in capsys.readouterr().out.splitlines()[0]
    few = Large(data.images[:20], data.labels[:20])
    assert type(as_data(few)) is ImageData
    fastbcd.score(net(), torch.tensor([[0]]), few, explain=True)
    assert "in memory" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_memory(workers):
    data = large()
    memory, stream = as_data(held(data)), StreamData(data, workers=workers)
    state = torch.get_rng_state()
    epoch = {"seed": 1, "step": 2, "epoch": 3}
    pairs = [
        (memory.batches(32), stream.batches(32)),
        (memory.shard(1, 3).rest(5).batches(7), stream.shard(1, 3).rest(5).batches(7)),
        (memory.train_batches(25, **epoch), stream.train_batches(25, **epoch)),
        (
            memory.train_batches(25, **epoch, padding=2, flip=False, rank=1, world=2),
            stream.train_batches(25, **epoch, padding=2, flip=False, rank=1, world=2),
        ),
    ]
    for expected, found in pairs:
        for one, other in zip(expected, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    picked = torch.tensor([5, 99, 0]), torch.tensor([0, 80, 161])
    assert torch.equal(stream.views(*picked), memory.views(*picked))
    assert stream.subset([7, 3]).ids.tolist() == [7, 3]


def test_bytes_are_normalised():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 6, 6, 3), dtype=np.uint8)
    stats = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    data = Large(images, [0, 1] * 10)
    stream = StreamData(data, **stats, classes=2)
    memory = ImageData.from_dataset(data, **stats)
    assert repr(stream) == "StreamData(20 × 3×6×6 uint8, 2 classes, cpu)"
    for (x, _), (y, _) in zip(stream.batches(8), memory.batches(8), strict=True):
        assert torch.equal(x, y)


def test_scores_choices_and_accuracy_are_those_of_memory(small_memory):
    data, model = large(), net()
    removals = torch.arange(40).view(8, 5)
    assert fastbcd.accuracy(model, data, 32) == fastbcd.accuracy(model, held(data), 32)
    assert torch.equal(
        fastbcd.saliency(model, data, batch_size=20),
        fastbcd.saliency(model, held(data), batch_size=20),
    )
    engine = fastbcd.Engine("stacked", batch_size=32)
    streamed, kept = (fastbcd.score(model, removals, d, engine) for d in (data, held(data)))
    assert torch.equal(streamed.correct, kept.correct)
    assert torch.equal(streamed.loss, kept.loss)
    one, other = (fastbcd.choose(model, removals, d, adt=-5.0, engine=engine)
                  for d in (data, held(data)))  # fmt: skip
    assert (one.number, one.drops) == (other.number, other.drops)


@pytest.mark.parametrize("teacher", [False, True])
def test_bcd_with_fine_tuning_resumes(teacher, small_memory, tmp_path):
    data, dense = large(), net().eval()
    options = {
        "budget": 104, "drc": 10, "rt": 2, "engine": fastbcd.Engine(batch_size=32),
        "finetune": Finetune(epochs=1, padding=1, batch_size=30),
        "teacher": dense if teacher else None,
    }  # fmt: skip
    whole = fastbcd.bcd(copy.deepcopy(dense), data, **options)
    memory = fastbcd.bcd(copy.deepcopy(dense), held(data), **options)
    assert whole.masks == memory.masks
    for a, b in zip(whole.model.parameters(), memory.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert teacher or torch.equal(a, b)

    broken = copy.deepcopy(dense)
    steps = fastbcd.steps(broken, data, run_dir=tmp_path, budget=104, drc=10, rt=2)
    next(steps), next(steps), steps.close()
    with pytest.raises(ValueError, match=r"data\.streamed is true there and \(missing\) now"):
        next(fastbcd.steps(broken, held(data), run_dir=tmp_path, budget=104, drc=10, rt=2))
    before = fastbcd.load_run(tmp_path, model=copy.deepcopy(dense)).masks.count()
    data.reads.clear()
    for _ in fastbcd.steps(broken, data, run_dir=tmp_path, budget=104, drc=10, rt=2):
        pass
    assert before == 134
    assert fastbcd.masks(broken).count() == 104
    other = Large(data.images[::-1], data.labels[::-1])
    with pytest.raises(ValueError, match=r"data\.digest"):
        next(fastbcd.steps(broken, other, run_dir=tmp_path, budget=104, drc=10, rt=2))


def test_training_and_snl_take_streams():
    data, models = large(), [net(), net()]
    for model, given in zip(models, (StreamData(data), held(data)), strict=True):
        fastbcd.train(model, given, epochs=1, padding=1, batch_size=30)
    assert torch.equal(models[0][0].weight, models[1][0].weight)
    options = {"lambda0": 1.0, "max_epochs": 1, "finetune": None, "batch_size": 60}
    with pytest.warns(RuntimeWarning, match="above the threshold"):
        start = fastbcd.snl(net(), StreamData(data), 60, teacher=net().eval(), **options)
    assert start.masks.count() == 60


class Endless(Dataset):
    """Two million images, more than any memory holds."""

    def __init__(self):
        self.reads: set[int] = set()

    def __len__(self):
        return 2_000_000

    def __getitem__(self, i):
        self.reads.add(i)
        image = np.random.default_rng(i).standard_normal((3, 256, 256), dtype=np.float32)
        return image, i % 2


def test_samples_reads_only_those():
    data = Endless()
    parts = nn.AvgPool2d(64), nn.Flatten(), nn.Linear(48, 12), fastbcd.MaskedReLU(12)
    model = nn.Sequential(*parts, nn.Linear(12, 2))
    run = fastbcd.bcd(model, data, budget=8, drc=2, rt=2, samples=6, finetune=None)
    assert run.masks.count() == 8
    assert data.reads == {*range(6), 1_999_998, 1_999_999}  # the last two are in the run's digest


def test_a_loader_of_ones_own_trains(small_memory):
    data = large()
    seen: list[int] = []

    class Augmented(Dataset):
        def __len__(self):
            return 50

        def __getitem__(self, i):
            seen.append(i)
            return torch.from_numpy(data.images[i]) + 0.01 * torch.randn(3, 6, 6), data.labels[i]

    loader = DataLoader(Augmented(), 16, shuffle=True, drop_last=True)
    stream = StreamData(data, train=loader)
    assert stream.sizes(30) == [16, 16, 16]
    runs = []
    for _ in range(2):
        tuner = fastbcd.Finetuner(net(), stream, Finetune(epochs=2), teacher=net().eval())
        runs.append(tuner.run(step=0)["loss"])
    assert len(seen) == 2 * 2 * 48
    assert runs[0] == runs[1]
    wrong = StreamData(data, train=DataLoader(Large(data.images.astype(float), data.labels), 16))
    with pytest.raises(ValueError, match=r"train= gives torch.float64 \[3, 6, 6\], the dataset"):
        fastbcd.Finetuner(net(), wrong, Finetune(epochs=1)).run(step=0)


def test_loaders_keep_their_part_and_their_workers():
    data = large()
    stream = StreamData(DataLoader(data, 4, sampler=SubsetRandomSampler([9, 2, 5])))
    assert stream.ids.tolist() == [2, 5, 9]
    assert stream.loading["num_workers"] == 0
    loader = DataLoader(data, 4, num_workers=1, multiprocessing_context="fork")
    for workers, used in ((None, 1), (0, 0)):
        stream = StreamData(loader, workers=workers)
        assert stream.loading["num_workers"] == used
        for size in (1, 50 if used else 30):
            assert torch.equal(next(stream.batches(size))[0], held(data)[0][:size])
    data.classes = ["a", "b"]
    assert StreamData(data).classes == 2


def test_targets_of_any_shape_are_streamed():
    data = large()
    data.labels = np.random.default_rng(1).standard_normal((120, 2))
    stream = StreamData(data)
    assert stream.classes is None
    assert torch.equal(next(stream.batches(8))[1], torch.from_numpy(data.labels[:8]))
    with pytest.raises(ValueError, match=r"needs class indices, .*float64 \[120, 2\]"):
        fastbcd.accuracy(net(), stream)


def test_what_cannot_be_streamed_is_refused():
    data = large()
    with pytest.raises(ValueError, match="another image each time"):
        StreamData(large(transform=lambda x: x + np.random.rand()))  # noqa: NPY002
    with pytest.raises(ValueError, match="workers=-1"):
        StreamData(data, workers=-1)
    with pytest.raises(ValueError, match="no items"):
        StreamData(Large(data.images[:0], []))
    data.labels[100] = 2
    with pytest.raises(ValueError, match="label 2 of image 100 is out of range: the net has 2"):
        fastbcd.accuracy(net(), StreamData(data), 32)
    data.images = [*data.images[:50], *data.images[50:, :, :5]]
    with pytest.raises(ValueError, match=r"image of item 50 .*\(3, 5, 6\), that of item 0 .*6, 6"):
        list(StreamData(data).batches(32))


def test_maps_with_a_metric_are_streamed():
    """Segmentation: the metric is the share of right pixels, the loss is cross-entropy."""
    data = large(60)
    data.labels = [(image[0] > 0).astype(np.int64) for image in data.images]

    def pixels(outputs, targets):
        return (outputs.argmax(1) == targets).double().flatten(1).mean(1)

    pixels.bounds = (0.0, 1.0)
    memory = torch.from_numpy(data.images), torch.from_numpy(np.stack(data.labels))
    runs = []
    for given in (StreamData(data), memory):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 1), fastbcd.MaskedReLU((4, 6, 6)), nn.Conv2d(4, 2, 1))
        tuning = Finetune(epochs=1, padding=0, flip=False, batch_size=16)
        engine = fastbcd.Engine(batch_size=16)
        options = {"drc": 20, "rt": 2, "finetune": tuning, "metric": pixels, "engine": engine}
        runs.append(fastbcd.bcd(model, given, 100, test=given, **options))
    assert runs[0].masks == runs[1].masks
    assert torch.equal(runs[0].model[0].weight, runs[1].model[0].weight)
    assert runs[0].history[-1].test_accuracy == runs[1].history[-1].test_accuracy > 40
