"""ImageData: normalised batches, views, and everything it can be made from."""

from __future__ import annotations

import hashlib
import sys
from types import SimpleNamespace

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
    WeightedRandomSampler,
)

from fastbcd.data import ImageData, archives, as_data, load, view_count

FORMATS = [torch.contiguous_format, torch.channels_last]
SHAPES = [(1, 1, 1, 1), (5, 3, 8, 8), (7, 1, 5, 9), (4, 4, 7, 3), (9, 2, 1, 6)]
# What the generator has to give on every machine and in every version, for 8 samples.
GOLDEN_VIEWS = [138, 112, 129, 123, 14, 54, 6, 40]
GOLDEN_ORDER = [5, 3, 0, 6, 1, 7, 2, 4]
EMBEDDED = ["1ed5c7bf87e37567", "6e8f8a41ac407232"]  # sha256 of images and labels, train and test
EPOCH = {"seed": 3, "step": 5, "epoch": 7}


def make(n=10, channels=3, height=6, width=5, classes=4, seed=0, device="cpu", **options):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, channels, height, width), dtype=np.uint8)
    labels = rng.integers(0, classes, n)
    return ImageData.from_arrays(images, labels, classes=classes, layout="NCHW", **options).to(
        device
    )


def naive_view(image, view, padding):
    """RandomCrop(size, padding) at one place, then a flip, pixel by pixel."""
    _, height, width = image.shape
    side = 2 * padding + 1
    top, left, flip = view // 2 // side, view // 2 % side, view % 2
    out = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            row, column = y + top - padding, (width - 1 - x if flip else x) + left - padding
            if 0 <= row < height and 0 <= column < width:
                out[:, y, x] = image[:, row, column]
    return out


def naive_normalise(images, mean, std):
    mean, std = (np.reshape(v, (-1, 1, 1)).astype(np.float64) for v in (mean, std))
    return (images / 255 - mean) / std


def close(x, expected, dtype=torch.float32):
    limit = {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, 2e-2)
    torch.testing.assert_close(
        x.cpu().double(), torch.as_tensor(expected), rtol=limit, atol=limit, check_dtype=False
    )


# ------------------------------------------------------------------------------ normalise


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 3, 4, 4)])
def test_normalise(shape, dtype, memory_format, device):
    n, channels, height, width = shape
    means, stds = (0.1, 0.4, 0.5, 0.9)[:channels], (0.2, 0.3, 1.5, 0.25)[:channels]
    images = make(n, channels, height, width, mean=means, std=stds, device=device)
    x = images.normalise(images.images, dtype=dtype, memory_format=memory_format)
    assert x.dtype == dtype
    assert x.is_contiguous(memory_format=memory_format)
    close(x, naive_normalise(images.images.cpu().numpy(), means, stds), dtype)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_normalise_does_not_depend_on_the_batch(memory_format, device):
    images = make(33, 3, 7, 5, device=device)
    whole = images.normalise(images.images)
    for size in (1, 2, 8, 33):
        parts = [x for x, _ in images.batches(size, memory_format=memory_format)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_normalise_into_a_buffer(memory_format):
    images = make()
    out = torch.full((10, 3, 6, 5), torch.nan).contiguous(memory_format=memory_format)
    x = images.normalise(images.images, out)
    assert x.data_ptr() == out.data_ptr()
    assert out.is_contiguous(memory_format=memory_format)
    assert torch.equal(out, images.normalise(images.images))
    with pytest.raises(ValueError, match=r"out has shape \(9, .*the images \(10, "):
        images.normalise(images.images, out[:9])


def test_floats_pass_as_they_are():
    x = torch.randn(4, 3, 5, 5)
    held = as_data((x, torch.tensor([0, 1, 2, 1])))
    assert held.images.data_ptr() == x.data_ptr()
    assert (held.mean, held.std, held.classes) == ((0.0,) * 3, (1.0,) * 3, 3)
    ((batch, _),) = held.batches(4)
    assert torch.equal(batch, x)
    assert batch.data_ptr() != x.data_ptr()  # a net may write into its input
    flipped = held.views(torch.arange(4), torch.full((4,), (4 * 9 + 4) * 2 + 1))
    assert torch.equal(flipped, x.flip(-1))
    corner = held.views(torch.arange(4), torch.zeros(4, dtype=torch.long), padding=1)
    assert torch.equal(corner[:, :, 1:, 1:], x[:, :, :-1, :-1])
    assert not corner[:, :, 0].any()
    scaled = as_data((x.double(), [0, 1, 2, 1]), mean=(0.5,) * 3, std=(2.0,) * 3)
    ((batch, _),) = scaled.batches(4, dtype=torch.float64)
    torch.testing.assert_close(batch, (x.double() - 0.5) / 2)


# -------------------------------------------------------------------------------- batches


@pytest.mark.parametrize(
    ("n", "size", "sizes"),
    [(0, 4, []), (1, 4, [1]), (8, 4, [4, 4]), (9, 4, [4, 4, 1]), (3, 1, [1] * 3)],
)
def test_batches_in_order(n, size, sizes):
    images = make(n)
    batches = list(images.batches(size))
    assert [len(y) for _, y in batches] == [len(x) for x, _ in batches] == sizes
    assert torch.equal(torch.cat([images.labels[:0], *(y for _, y in batches)]), images.labels)
    trained = list(images.train_batches(size, **EPOCH))
    assert [len(x) for x, *_ in trained] == sizes


@pytest.mark.parametrize("size", [0, -1])
def test_batch_size_is_checked_at_once(size):
    with pytest.raises(ValueError, match=f"batch_size is {size}"):
        make().batches(size)
    with pytest.raises(ValueError, match=f"batch_size is {size}"):
        make().train_batches(size, **EPOCH)


# ---------------------------------------------------------------------------------- views


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_views(shape, padding, memory_format, device):
    images = make(*shape, device=device)
    rng = np.random.default_rng(1)
    indices = rng.integers(0, len(images), 30)
    views = rng.integers(0, view_count(padding), 30)
    raw = images.images.cpu().numpy()
    expected = np.stack(
        [naive_view(raw[i], v, padding) for i, v in zip(indices, views, strict=True)]
    )
    where = torch.from_numpy(indices).to(device), torch.from_numpy(views).to(device)
    x = images.views(*where, padding=padding, memory_format=memory_format)
    assert x.is_contiguous(memory_format=memory_format)
    close(x, naive_normalise(expected, images.mean, images.std))
    out = torch.full_like(x, torch.nan)
    assert images.views(*where, padding=padding, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, x)


def test_all_views_of_torchvision(torchvision):
    tv = torchvision.transforms.functional
    images = make(1, 3, 8, 8)
    padded = tv.pad(images.images[0], 4)
    for view in range(162):
        crop = tv.crop(padded, view // 2 // 9, view // 2 % 9, 8, 8)
        crop = tv.hflip(crop) if view % 2 else crop
        expected = tv.normalize(tv.convert_image_dtype(crop), images.mean, images.std)
        close(images.views(torch.tensor([0]), torch.tensor([view]))[0], expected.double())


def test_no_views_at_all():
    nothing = torch.empty(0, dtype=torch.long)
    assert make().views(nothing, nothing).shape == (0, 3, 6, 5)


@pytest.mark.parametrize(("view", "padding"), [(-1, 4), (162, 4), (18, 1), (2, 0)])
def test_views_that_do_not_exist(view, padding):
    with pytest.raises(
        ValueError, match=rf"view_ids go from .*{view}.*0 to {view_count(padding) - 1}"
    ):
        make().views(torch.tensor([0]), torch.tensor([view]), padding=padding)
    with pytest.raises(ValueError, match="padding is -2"):
        view_count(-2)


def test_random_numbers_stay_the_same_for_ever():
    images = make(8)
    assert images.view_ids(seed=0, step=0, epoch=0).tolist() == GOLDEN_VIEWS
    assert images.order(seed=1, step=2, epoch=3).tolist() == GOLDEN_ORDER


def test_random_numbers_are_functions_of_the_sample_alone(device):
    images = make(101, device=device)
    views, order = images.view_ids(**EPOCH), images.order(**EPOCH)
    assert views.device == order.device == images.device
    assert torch.equal(order.sort().values, torch.arange(101, device=device))
    rank = order.argsort()
    parts = [images.first(13), images.subset([100, 3, 50, 3]), images.subset([])]
    parts += [images.shard(r, 4) for r in range(4)] + [images.shard(1, 2).shard(1, 3)]
    for part in parts:
        assert torch.equal(part.view_ids(**EPOCH), views[part.ids])
        mine = rank[part.ids][part.order(**EPOCH)]
        assert torch.equal(mine, mine.sort().values)


def test_random_numbers_differ_by_seed_step_and_epoch():
    images = make(200)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**63 - 1, 0, 0), (0, 2**40, 0)]
    for draw in (images.view_ids, images.order):
        drawn = {tuple(draw(seed=a, step=b, epoch=c).tolist()) for a, b, c in keys}
        assert len(drawn) == len(keys)
    for name, value in (("seed", -1), ("step", 2**63), ("epoch", -5)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            images.order(**{**EPOCH, name: value})


def test_views_are_drawn_evenly():
    images = make(162 * 100, 1, 1, 1)
    counts = torch.bincount(images.view_ids(**EPOCH), minlength=162)
    assert len(counts) == 162
    chi2 = float(((counts - 100.0) ** 2 / 100).sum())
    assert 100 < chi2 < 240  # 161 degrees of freedom: five sigma
    assert images.view_ids(**EPOCH, padding=0).unique().tolist() == [0, 1]
    unflipped = images.view_ids(**EPOCH, flip=False)
    assert torch.equal(unflipped, images.view_ids(**EPOCH) // 2 * 2)


@pytest.mark.parametrize("options", [{}, {"padding": 2, "flip": False}])
def test_train_batches(options, device):
    images = make(21, device=device)
    order, views = images.order(**EPOCH), images.view_ids(**EPOCH, **options)
    padding = {"padding": options.get("padding", 4)}
    seen = []
    for x, y, indices, ids in images.train_batches(8, **EPOCH, **options):
        assert torch.equal(y, images.labels[indices])
        assert torch.equal(ids, views[indices])
        assert torch.equal(x, images.views(indices, ids, **padding))
        seen.append(indices)
    assert torch.equal(torch.cat(seen), order)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_train_batches_are_the_same_for_any_number_of_ranks(world):
    images = make(18)
    alone = [i.tolist() for _, _, i, _ in images.train_batches(8, **EPOCH)]
    if world > 2:
        alone.pop()  # two samples are too few for these ranks
    ranks = [
        [i.tolist() for _, _, i, _ in images.train_batches(8, **EPOCH, rank=r, world=world)]
        for r in range(world)
    ]
    joined = [[i for part in parts for i in part] for parts in zip(*ranks, strict=True)]
    assert joined == alone
    assert all(part for rank in ranks for part in rank)


# ---------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(("n", "world"), [(0, 3), (1, 3), (10, 1), (10, 3), (11, 4)])
def test_shards(n, world):
    images = make(n)
    shards = [images.shard(r, world) for r in range(world)]
    sizes = [len(s) for s in shards]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([s.images for s in shards]), images.images)
    assert all(s.mean == images.mean and s.classes == images.classes for s in shards)


def test_parts_that_are_not_there():
    images = make(10)
    for rank, world in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} of world {world}"):
            images.shard(rank, world)
    with pytest.raises(ValueError, match=r"first\(11\): there are 10"):
        images.first(11)
    with pytest.raises(IndexError, match="from -1 to 3; there are 10"):
        images.subset([3, -1])
    with pytest.raises(AttributeError):
        images.classes = 3


# --------------------------------------------------------------------------------- arrays


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
    # What only a caller can know: 3×3 images with their channels last.
    square = kind(x[:, :, :3, :3].copy())
    assert torch.equal(ImageData.from_arrays(square, y).images, torch.as_tensor(square))
    swapped = ImageData.from_arrays(square, y, layout="NHWC").images
    assert torch.equal(swapped, torch.as_tensor(square).permute(0, 3, 1, 2))
    # Floats are never guessed at.
    assert (
        ImageData.from_arrays(kind(np.zeros((2, 8, 3, 3), np.float32)), y[:2]).images.shape[1] == 8
    )


def test_read_only_and_reversed_arrays():
    x = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    x.flags.writeable = False
    assert ImageData.from_arrays(x, [0, 1]).images.tolist() == x.tolist()
    assert ImageData.from_arrays(x[::-1], [0, 1]).images.tolist() == x[::-1].tolist()


def test_statistics_are_exact():
    images = make(50, 3, 9, 7)
    raw = images.images.numpy() / 255
    np.testing.assert_allclose(images.mean, raw.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(images.std, raw.std((0, 2, 3)), rtol=1e-12)
    constant = ImageData.from_arrays(np.full((2, 1, 3, 3), 51, np.uint8), [0, 0])
    assert (constant.mean, constant.std) == ((0.2,), (1.0,))
    half = ImageData.from_arrays(np.zeros((2, 1, 3, 3), np.uint8), [0, 0], mean=[0.5])
    assert (half.mean, half.std) == ((0.5,), (1.0,))


X = np.zeros((3, 3, 4, 4), np.uint8)


@pytest.mark.parametrize(
    ("images", "labels", "options", "message"),
    [
        (X, [0, 1, 7], {"classes": 5}, r"labels\[2\] is 7; with 5 classes labels are 0 to 4"),
        (X, [0, -1, -2], {}, r"labels\[1\] is -1"),
        (X, [0, 1], {}, "labels are torch.int64 \\[2\\] beside 3 images"),
        (X, [0.0, 1.0, 2.0], {}, "labels are float64; they must be whole"),
        (X, torch.zeros(3), {}, "labels are torch.float32; they must be whole"),
        (X, torch.zeros(3, dtype=torch.bool), {}, "labels are torch.bool"),
        (X, np.eye(3, dtype=int), {}, r"labels are \[3, 3\].*argmax"),
        (X.astype(np.int64), [0, 1, 2], {}, "images are torch.int64; give uint8"),
        (X[0, 0], [0, 1, 2], {}, r"images are \[4, 4\], not \[N,C,H,W\]"),
        (X, [0, 1, 2], {"mean": (0.5,)}, "mean has 1 values for 3 channels"),
        (X, [0, 1, 2], {"std": (0.1, 0.0, 1.0)}, r"std is \(0.1, 0.0, 1.0\); .* above 0"),
        (X, [0, 1, 2], {"mean": (0.1, float("nan"), 1.0)}, "mean is .*finite"),
        (X, [0, 1, 2], {"layout": "HWCN"}, "layout is 'HWCN'"),
    ],
)
def test_arrays_refused(images, labels, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ImageData.from_arrays(images, labels, **options)


def test_constructor_refuses_what_from_arrays_would_have_mended():
    images, labels = torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.tensor([0, 1])
    assert len(ImageData(images, labels, (0.0,), (1.0,), 2)) == 2
    with pytest.raises(ValueError, match=r"labels are torch.int32"):
        ImageData(images, labels.int(), (0.0,), (1.0,), 2)
    with pytest.raises(TypeError, match=r"images are torch.float16"):
        ImageData(images.half(), labels, (0.0,), (1.0,), 2)
    with pytest.raises(ValueError, match=r"images have shape \[2, 3, 3\]"):
        ImageData(images[:, 0], labels, (0.0,), (1.0,), 2)


# -------------------------------------------------------------------- datasets and loaders


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


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_datasets(transform):
    items = Items(RAW.images, RAW.labels, transform)
    read = as_data(items, MEAN, STD)
    assert torch.equal(read.images, RAW.images)
    assert torch.equal(read.labels, RAW.labels)
    assert (read.mean, read.std) == (MEAN, STD)
    loader = as_data(DataLoader(items, batch_size=5, shuffle=True), MEAN, STD)
    assert torch.equal(loader.images, RAW.images)


def test_one_bright_image_does_not_pass_for_another():
    # Normalised with 0.5 and 0.5, bytes from 128 on become k/255 themselves.
    images = RAW.images.clone()
    images[1] |= 128
    items = Items(images, RAW.labels, lambda x: (x / 255 - 0.5) / 0.5)
    assert torch.equal(as_data(items, (0.5,) * 3, (0.5,) * 3).images, images)


def test_grey_pictures():
    items = Items(RAW.images, RAW.labels.tolist(), lambda x: Picture(x[0].numpy(), "L"))
    assert torch.equal(ImageData.from_dataset(items).images, RAW.images[:, :1])


def test_tensor_dataset_is_its_pair():
    x = torch.randn(5, 3, 4, 4)
    read = as_data(TensorDataset(x, torch.arange(5)))
    assert read.images.data_ptr() == x.data_ptr()


def test_subsets():
    items = Items(RAW.images, RAW.labels)
    picked = DataLoader(items, sampler=SubsetRandomSampler([9, 2, 5]))
    part = ImageData.from_loader(picked, classes=4)
    assert part.ids.tolist() == [2, 5, 9]
    assert torch.equal(part.images, RAW.images[[2, 5, 9]])
    assert torch.equal(as_data(Subset(items, [4, 1])).images, RAW.images[[4, 1]])
    with pytest.raises(TypeError, match="WeightedRandomSampler may leave samples out"):
        as_data(DataLoader(items, sampler=WeightedRandomSampler([0.5] * 12, 12)))


def random_flip(x):
    return x.flip(-1) if torch.rand(()) < 0.5 else x


def refuse(transform=lambda x: x, images=RAW.images, labels=RAW.labels, mean=None, std=None):
    return lambda: ImageData.from_dataset(Items(images, labels, transform), mean, std)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (
            refuse(TRANSFORMS["Normalize"]),
            "item 0 .*not all k/255.*looks normalised; give the mean",
        ),
        (refuse(TRANSFORMS["Normalize"], mean=STD, std=MEAN), "item 0.*is not undone by the mean"),
        (refuse(random_flip), "another image each time.*without its random transforms"),
        (
            refuse(images=[RAW.images[0], RAW.images[1, :, 1:]]),
            r"item 1 .*\(3, 5, 5\), item 0 \(3, 6",
        ),
        (refuse(labels=["cat"] * 12), "label of item 0 .* is 'cat', not an int"),
        (refuse(lambda x: x * torch.nan), "item 0 .*from nan to nan, not all k/255"),
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


def test_as_data_keeps_image_data():
    assert as_data(RAW) is RAW
    other = as_data(RAW, mean=[0.0] * 3)
    assert (other.mean, other.std) == ((0.0,) * 3, RAW.std)
    assert other.images is RAW.images


# ------------------------------------------------------------------------------------ load


def digest(images):
    return hashlib.sha256(
        images.images.numpy().tobytes() + images.labels.numpy().tobytes()
    ).hexdigest()


def test_embedded_data_is_whole():
    train, test = load("fashion-mnist-mini"), load("fashion-mnist-mini", "test")
    assert (len(train), len(test), train.classes) == (8000, 2000, 10)
    assert (train.mean, train.std) == (test.mean, test.std) == ((0.2860,), (0.3530,))
    assert [digest(train)[:16], digest(test)[:16]] == EMBEDDED


def test_npz_splits_are_treated_alike(tmp_path):
    train, test = make(20, classes=9, seed=1), make(7, classes=3, seed=2)
    file = tmp_path / "own.npz"
    np.savez(
        file,
        train_images=train.images, train_labels=train.labels,
        test_images=test.images.permute(0, 2, 3, 1), test_labels=test.labels,
    )  # fmt: skip
    one, other = load(file), load(str(file), "test")
    assert torch.equal(one.images, train.images)
    assert torch.equal(other.images, test.images)
    assert torch.equal(other.labels, test.labels)
    assert other.mean == one.mean == train.mean
    assert other.std == one.std == train.std
    assert other.classes == one.classes == int(train.labels.max()) + 1
    assert ImageData.from_npz(file, "test", mean=MEAN).mean == MEAN
    np.savez(tmp_path / "plain.npz", images=test.images, labels=test.labels)
    assert torch.equal(load(tmp_path / "plain.npz").images, test.images)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train_images": X}, r"own.npz has no array 'train_labels'; it has train_images"),
        ({"x": X}, r"own.npz has no array 'train_images'; it has x"),
        ({"images": X, "labels": [0, 1, -4]}, r"own.npz, split 'train': labels\[2\] is -4"),
        (
            {"images": X.astype(float), "labels": [[0]]},
            r"own.npz, split 'train': labels are \[1, 1\]",
        ),
        ({"images": X.astype(np.int16), "labels": [0] * 3}, "own.npz.*images are torch.int16"),
    ],
)
def test_npz_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises((ValueError, TypeError), match=message):
        load(tmp_path / "own.npz")


def test_load_refuses(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"no data is called 'cifar11'; there are .*cifar10, cifar100"
    ):
        load("cifar11")
    with pytest.raises(ValueError, match="split is 'val'; cifar10 has 'train' and 'test'"):
        load("cifar10", "val")
    monkeypatch.setenv("FASTBCD_DATA", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=f"no CIFAR-100 in {tmp_path}.*cifar-100-python.tar.gz"
    ):
        load("cifar100")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/wnids.txt.*tiny-imagenet-200.zip"):
        load("tiny-imagenet")


def test_download_goes_through_torchvision(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(
        ImportError, match=f"pip install torchvision.*cifar-10-python.tar.gz.*{tmp_path}"
    ):
        load("cifar10", root=tmp_path, download=True)

    def fetch(root, download):
        assert download
        folder = tmp_path / "cifar-10-batches-bin"
        folder.mkdir()
        (folder / "test_batch.bin").write_bytes((b"\x07" + bytes(3072)) * 3)

    monkeypatch.setitem(sys.modules, "torchvision.datasets", SimpleNamespace(CIFAR10=fetch))
    monkeypatch.setitem(archives.PUBLISHED, "test", 3)
    read = load("cifar10", "test", root=tmp_path, download=True)
    assert read.labels.tolist() == [7, 7, 7]
    assert (read.mean, read.classes) == ((0.4914, 0.4822, 0.4465), 10)
