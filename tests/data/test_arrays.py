"""ImageData from arrays, datasets and loaders: layouts, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import fastbcd
from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from helpers.image_cases import make


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_array_layouts(kind):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (4, 3, 6, 5), dtype=np.uint8)
    y = kind(np.array([0, 2, 1, 0], dtype=np.uint8))
    first = ImageData.from_arrays(kind(x), y)
    last = ImageData.from_arrays(kind(np.ascontiguousarray(x.transpose(0, 2, 3, 1))), y)
    assert torch.equal(first.images, last.images)
    assert last.images.is_contiguous()
    assert first.labels.dtype == torch.int64
    grey = ImageData.from_arrays(kind(x[:, 0]), y)
    assert torch.equal(grey.images, first.images[:, :1])
    square = kind(x[:, :, :3, :3].copy())
    assert torch.equal(ImageData.from_arrays(square, y).images, torch.as_tensor(square))
    # The layout of floats is not guessed.
    assert (
        ImageData.from_arrays(kind(np.zeros((2, 8, 3, 3), np.float32)), y[:2]).images.shape[1] == 8
    )


def test_read_only_and_reversed_arrays():
    x = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    x.flags.writeable = False
    assert ImageData.from_arrays(x, [0, 1]).images.tolist() == x.tolist()
    assert ImageData.from_arrays(x[::-1], [0, 1]).images.tolist() == x[::-1].tolist()


def test_bytes_are_normalised_only_by_what_is_given():
    raw = RAW.images
    plain = ImageData.from_arrays(raw, RAW.labels)
    assert (plain.mean, plain.std) == ((0.0,) * 3, (1.0,) * 3)
    torch.testing.assert_close(next(plain.batches(12))[0], raw / 255)
    half = ImageData.from_arrays(raw, RAW.labels, mean=MEAN)
    assert (half.mean, half.std) == (MEAN, (1.0,) * 3)


@pytest.mark.parametrize("name", ["ToTensor", "scaled by 1/255", "Normalize", "random floats"])
def test_float_datasets_are_used_as_they_are(name):
    """In `as_data`, `score` and `bcd`: the net sees the floats of the Dataset."""
    random = torch.randn(12, 3, 6, 5, generator=torch.Generator().manual_seed(0))
    images = random if name == "random floats" else RAW.images
    transform = TRANSFORMS.get(name, lambda x: x)
    items = Items(images, RAW.labels, transform)
    floats = torch.stack([transform(image) for image in images])
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(90, 4), fastbcd.MaskedReLU(4))
    correct = int((net(floats).argmax(1) == RAW.labels).sum())
    removals = torch.tensor([[0], [3]])
    expected = fastbcd.score(net, removals, (floats, RAW.labels))
    for data in (items, DataLoader(items, batch_size=5, shuffle=True), Subset(items, range(12))):
        read = as_data(data)
        assert torch.equal(next(read.batches(12))[0], floats)
        scores = fastbcd.score(net, removals, data)
        assert scores.base_correct == correct
        assert torch.equal(scores.loss, expected.loss)
    finetune = fastbcd.Finetune(epochs=1, padding=1, batch_size=4)
    options = {"budget": 2, "drc": 1, "rt": 2, "finetune": finetune, "test": items}
    runs = [fastbcd.bcd(net, data, **options) for data in (items, (floats, RAW.labels))]
    assert runs[0].masks == runs[1].masks
    assert torch.equal(runs[0].model[1].weight, runs[1].model[1].weight)


X = np.zeros((3, 3, 4, 4), np.uint8)


@pytest.mark.parametrize(
    ("images", "labels", "options", "message"),
    [
        (
            X,
            [0, 1, 7],
            {"classes": 5},
            "label 7 of image 2 is out of range: the data has 5 classes",
        ),
        (X, [0, -1, -2], {}, "label -1 of image 1 is out of range"),
        (X, [0, 1], {}, "labels are torch.int64 \\[2\\] beside 3 images"),
        (X, ["a", "b", "c"], {}, "labels are <U1; they must be real numbers"),
        (X, torch.zeros(3, dtype=torch.complex64), {}, "labels are torch.complex64; .* real"),
        (X, torch.zeros(3), {"classes": 2}, r"float32 \[3\], not class indices, .*classes=2 must"),
        (X, torch.tensor(3), {}, r"labels are torch.int64 \[\] beside 3 images"),
        (X.astype(np.int64), [0, 1, 2], {}, "images are torch.int64; they must be uint8"),
        (X[:, 0, 0, 0], [0, 1, 2], {}, r"images have shape \[3\], not \[N,C,H,W\]"),
        (X, [0, 1, 2], {"mean": (0.5,)}, "mean has 1 values for 3 channels"),
        (X, [0, 1, 2], {"std": (0.1, 0.0, 1.0)}, r"std is \(0.1, 0.0, 1.0\); .* above 0"),
        (X, [0, 1, 2], {"mean": (0.1, float("nan"), 1.0)}, "mean is .*finite"),
        (X, [0, 1, 2], {"mean": "x"}, "mean='x'; it must have a number for each channel"),
        (X, [0, 1, 2], {"std": 3}, "std has 1 values for 3 channels"),
        (X, [0, 1, 2], {"classes": 10**70}, "classes=1000.*at most"),
        (X, [0, 1, 2], {"classes": 2.5}, "classes=2.5; it must be a whole number"),
        (X[:, :, :0], [0, 1, 2], {}, r"shape \[3, 3, 0, 4\], not .*at least 1"),
        (
            torch.zeros(3, 3, 4, 4, device="meta"),
            [0, 1, 2],
            {},
            "images are torch.float32, .*on the device meta",
        ),
        (
            torch.zeros(3, 3, 4, 4).to_sparse(),
            [0, 1, 2],
            {},
            "images are torch.float32, torch.sparse_coo.*to_dense",
        ),
        (
            X,
            torch.tensor([0, 1, 2], device="meta"),
            {},
            "labels are torch.int64, .*on the device meta",
        ),
        (X, torch.tensor([0, 1, 2]).to_sparse(), {}, "labels are torch.int64, torch.sparse_coo"),
        (torch.zeros(3, 3, 4, 4, dtype=torch.complex64), [0, 1, 2], {}, "images are torch.complex"),
    ],
)
def test_arrays_refused(images, labels, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ImageData.from_arrays(images, labels, **options)


def test_the_constructor_does_not_convert():
    images, labels = torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.tensor([0, 1])
    assert len(ImageData(images, labels, (0.0,), (1.0,), 2)) == 2
    with pytest.raises(ValueError, match=r"labels are torch.int32"):
        ImageData(images, labels.int(), (0.0,), (1.0,), 2)
    with pytest.raises(TypeError, match=r"images are torch.float16"):
        ImageData(images.half(), labels, (0.0,), (1.0,), 2)
    with pytest.raises(ValueError, match=r"mean has 1 values for 3 channels"):
        ImageData(images[:, 0], labels, (0.0,), (1.0,), 2)


class Items(Dataset):
    """A Dataset of given (image, label) items, with a transform."""

    def __init__(self, images, labels, transform=lambda x: x):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i]), self.labels[i]


class Picture:
    """What is known of a PIL image: a mode and the array interface."""

    def __init__(self, array, mode):
        self.array, self.mode = array, mode
        self.__array_interface__ = array.__array_interface__


RAW = make(12, 3, 6, 5, seed=4)
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.1)


def column(values):
    return torch.tensor(values).view(3, 1, 1)


TRANSFORMS = {
    "uint8 tensor": lambda x: x,
    "array": lambda x: x.permute(1, 2, 0).numpy(),
    "ToTensor": lambda x: x.float() / 255,
    "scaled by 1/255": lambda x: x.float() * (1 / 255),
    "Normalize": lambda x: (x / 255 - column(MEAN)) / column(STD),
    "PIL": lambda x: Picture(np.ascontiguousarray(x.permute(1, 2, 0).numpy()), "RGB"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["uint8 tensor", "array", "PIL"])
def test_datasets_of_bytes(name):
    items = Items(RAW.images, RAW.labels, TRANSFORMS[name])
    for source in (items, DataLoader(items, batch_size=5, shuffle=True)):
        read = ImageData.from_dataset(source, MEAN, STD)
        assert torch.equal(read.images, RAW.images)
        assert torch.equal(read.labels, RAW.labels)
        assert (read.mean, read.std) == (MEAN, STD)


def test_grey_pictures():
    items = Items(RAW.images, RAW.labels.tolist(), lambda x: Picture(x[0].numpy(), "L"))
    assert torch.equal(ImageData.from_dataset(items).images, RAW.images[:, :1])


def test_tensor_dataset_shares_its_tensors():
    x = torch.randn(5, 3, 4, 4)
    read = as_data(TensorDataset(x, torch.arange(5)))
    assert read.images.data_ptr() == x.data_ptr()


def test_subsets():
    items = Items(RAW.images, RAW.labels)
    assert torch.equal(as_data(Subset(items, [4, 1])).images, RAW.images[[4, 1]])
    with pytest.raises(TypeError, match="SubsetRandomSampler may leave samples out"):
        as_data(DataLoader(items, sampler=SubsetRandomSampler([9, 2, 5])))


def random_flip(x):
    return x.flip(-1) if torch.rand(()) < 0.5 else x


def refuse(transform=lambda x: x, images=RAW.images, labels=RAW.labels):
    return lambda: ImageData.from_dataset(Items(images, labels, transform))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (refuse(random_flip), "another image each time.*without its random transforms"),
        (
            refuse(images=[RAW.images[0], RAW.images[1, :, 1:]]),
            r"item 1 .*uint8 \(3, 5, 5\)', .*, those of item 0 \['uint8 \(3, 6",
        ),
        (refuse(labels=["cat"] * 12), "label of item 0 .* are <U3; they must be real numbers"),
        (refuse(lambda x: x.to("meta")), "item 0 .*on the device meta"),
        (refuse(lambda x: x.float().to_sparse()), "item 0 .*torch.sparse_coo.*to_dense"),
        (refuse(lambda x: x.long()), r"item 0 .*int64 \[3, 6, 5\]"),
        (refuse(lambda x: None), "item 0 .*NoneType"),
        (refuse(lambda x: Picture(x[0].numpy(), "P")), r"item 0 .*mode 'P'.*convert\('RGB'\)"),
        (refuse(images=[]), "no items"),
        (lambda: as_data(Stream()), "Stream has no length"),
        (lambda: ImageData.from_dataset([1, 2]), "item 0 of the dataset is a int"),
        (lambda: as_data("cifar10"), "data is a str; give ImageData"),
        (lambda: as_data((1, 2)), "data is a tuple"),
    ],
)
def test_datasets_refused(read, message):
    torch.manual_seed(0)
    with pytest.raises((ValueError, TypeError), match=message):
        read()


NONE = (torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.int64))
SOME = (torch.zeros(4, 1, 4, 4), torch.arange(4))


@pytest.mark.parametrize(
    "use",
    [
        lambda net: fastbcd.score(net, [[0]], NONE),
        lambda net: fastbcd.accuracy(net, NONE),
        lambda net: fastbcd.bcd(net, NONE, 2),
        lambda net: fastbcd.bcd(net, SOME, 2, test=NONE),
        lambda net: fastbcd.linearize(net, NONE, 2, epochs=1),
        lambda net: fastbcd.train(net, NONE, epochs=1),
        lambda net: fastbcd.saliency(net, NONE),
        lambda net: fastbcd.to_line(net, NONE),
        lambda net: fastbcd.private.ranges(net, NONE),
    ],
)
def test_empty_data_is_refused_by_name(use):
    layers = torch.nn.Flatten(), torch.nn.Linear(16, 4), fastbcd.MaskedReLU(4)
    with pytest.raises(ValueError, match="there are no images in the data, ImageData"):
        use(torch.nn.Sequential(*layers))


def test_as_data_keeps_image_data():
    assert as_data(RAW) is RAW


# ------------------------------------------------------------------ other inputs and targets


@pytest.mark.parametrize("shape", [(3, 64), (64,), (2, 4, 5, 6), (1, 3, 64)])
def test_inputs_of_any_shape_stay_as_they_are(shape):
    x = torch.randn(6, *shape)
    items = Items(x, [0, 1, 2, 0, 1, 2])
    for data in ((x, torch.arange(6) % 3), (x.numpy(), items.labels), items, DataLoader(items)):
        read = as_data(data)
        assert read.images.shape == x.shape
        ((batch, labels),) = read.batches(6, memory_format=torch.channels_last)
        assert torch.equal(batch, x)
        assert torch.equal(labels, torch.arange(6) % 3)
    shuffled = read.train_batches(4, seed=0, step=0, epoch=0, padding=0, flip=False)
    for batch, _, indices, _ in shuffled:
        assert torch.equal(batch, x[indices])


def test_bytes_of_any_shape_are_normalised_per_channel():
    x = torch.randint(0, 256, (4, 2, 3, 3, 3), dtype=torch.uint8)
    read = ImageData.from_arrays(x, torch.arange(4), mean=(0.5, 0.25), std=(0.1, 2.0))
    expected = [(x[:, :1] / 255 - 0.5) / 0.1, (x[:, 1:] / 255 - 0.25) / 2]
    torch.testing.assert_close(next(read.batches(4))[0], torch.cat(expected, 1))
    flat = ImageData.from_arrays(x.flatten(1), torch.arange(4), mean=(0.5,), std=(0.1,))
    torch.testing.assert_close(next(flat.batches(4))[0], (x.flatten(1) / 255 - 0.5) / 0.1)


def test_grey_images_are_bytes():
    grey = RAW.images[:, 0]
    assert as_data((grey, RAW.labels)).images.shape == (12, 1, 6, 5)
    assert as_data(Items(grey, RAW.labels)).images.shape == (12, 1, 6, 5)
    assert as_data((grey / 255, RAW.labels)).images.shape == (12, 6, 5)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(24, 4))
    with pytest.raises(ValueError, match=r"images of shape \[6, 5\].*images.unsqueeze\(1\)"):
        fastbcd.accuracy(net, (grey / 255, RAW.labels))


TARGETS = {
    "maps": torch.randint(0, 5, (12, 6, 5)),
    "several labels": torch.randint(0, 2, (12, 7)).float(),
    "several bools": torch.randint(0, 2, (12, 7)).bool(),
    "numbers": torch.randn(12),
    "boxes": torch.randn(12, 4, 2, dtype=torch.float64),
}


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_targets_of_any_shape(targets):
    items = Items(RAW.images, targets)
    for data in ((RAW.images, targets), (RAW.images, targets.numpy()), items, DataLoader(items)):
        read = as_data(data)
        assert read.classes is None
        assert read.labels.dtype == targets.dtype
        assert torch.equal(read.labels, targets)
        assert torch.equal(read.shard(1, 2).labels, targets[6:])
        assert torch.equal(torch.cat([y for _, y in read.batches(5)]), targets)
    assert f"targets {'×'.join(map(str, targets.shape[1:])) or 1} " in repr(read)
    net = torch.nn.Sequential(torch.nn.Flatten(), fastbcd.MaskedReLU(90), torch.nn.Linear(90, 4))
    message = rf"needs class indices, but the labels are {targets.dtype} \[12.*argmax.*metric"
    with pytest.raises(ValueError, match=message):
        fastbcd.accuracy(net, data)
    with pytest.raises(ValueError, match=r"cross-entropy needs logits .*pass loss="):
        fastbcd.saliency(net, data)


def test_targets_that_are_pictures_or_lists():
    masks = RAW.images[:, 0]
    pictures = as_data(Items(RAW.images, [Picture(m.numpy(), "P") for m in masks]))
    assert torch.equal(pictures.labels, masks.long())
    assert as_data(Items(RAW.images, [[0.5, 1.5]] * 12)).labels.shape == (12, 2)
    with pytest.raises(ValueError, match=r"target of item 1 .*\(2,\).* of item 0 .*\(1,\)"):
        as_data(Items(RAW.images, [np.zeros(1), *[np.zeros(2)] * 11]))


def test_crops_and_flips_are_for_images():
    epoch = {"seed": 0, "step": 0, "epoch": 0}
    signals = as_data((torch.randn(4, 3, 64), torch.arange(4)))
    with pytest.raises(ValueError, match=r"flip=True is for images .*\[4, 3, 64\]: .*flip=False"):
        signals.train_batches(2, **epoch, padding=0)
    with pytest.raises(ValueError, match=r"padding=4, flip=False is for images"):
        signals.train_batches(2, **epoch, flip=False)
    maps = as_data((RAW.images, TARGETS["maps"]))
    with pytest.raises(ValueError, match=r"but not their targets \[12, 6, 5\]: use padding=0"):
        maps.train_batches(2, **epoch)
    assert len(list(maps.train_batches(6, **epoch, padding=0, flip=False))) == 2
    assert len(list(as_data((RAW.images, torch.randn(12))).train_batches(6, **epoch))) == 2


@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ((2, 8), lambda: torch.nn.Conv1d(2, 3, 3, padding=1)),
        ((2, 2, 2, 4), lambda: torch.nn.Conv3d(2, 3, 3, padding=1)),
        ((16,), lambda: torch.nn.Linear(16, 24)),
    ],
)
def test_bcd_on_inputs_of_any_shape(shape, layer, tmp_path):
    torch.manual_seed(0)
    parts = [layer(), torch.nn.ReLU(), torch.nn.Flatten()]
    x = torch.randn(20, *shape)
    size = torch.nn.Sequential(*parts)(x).shape[1]
    dense = torch.nn.Sequential(*parts, torch.nn.Linear(size, 3))
    net = fastbcd.convert(dense, x)
    data = x, torch.arange(20) % 3
    assert fastbcd.saliency(net, data).shape == (size,)
    for engine in ("sequential", "stacked", "collapsed")[: 2 if len(shape) == 4 else 3]:
        scores = fastbcd.score(net, torch.tensor([[0], [1]]), data, engine)
        assert scores.base_correct == int((dense(x).argmax(1) == data[1]).sum())
    plain = {"epochs": 1, "padding": 0, "flip": False, "batch_size": 8}
    options = {"budget": size - 4, "drc": 2, "rt": 2, "teacher": dense, "run_dir": tmp_path / "run"}
    for _ in range(2):  # the second resumes
        run = fastbcd.bcd(net, data, finetune=fastbcd.Finetune(**plain), **options)
        assert run.masks.count() == size - 4
    with pytest.raises(ValueError, match="padding=4, flip=True is for images"):
        fastbcd.bcd(net, data, **{**options, "run_dir": None, "budget": 1})
    assert fastbcd.load_run(tmp_path / "run", model=net).config.data.shape == list(shape)
