"""ImageData: normalised batches, views and parts of it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fastbcd.data import pixels
from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data
from helpers.image_cases import make

FORMATS = [torch.contiguous_format, torch.channels_last]
SHAPES = [(1, 1, 4, 4), (5, 3, 8, 8), (7, 1, 5, 9), (4, 4, 7, 3), (9, 2, 1, 6)]
# What the generator gives on every machine and in every version, for 8 samples.
GOLDEN_VIEWS = [138, 112, 129, 123, 14, 54, 6, 40]
GOLDEN_ORDER = [5, 3, 0, 6, 1, 7, 2, 4]
EPOCH = {"seed": 3, "step": 5, "epoch": 7}


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
    scaled = ImageData.from_arrays(x.double(), [0, 1, 2, 1], mean=(0.5,) * 3, std=(2.0,) * 3)
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
    with pytest.raises(ValueError, match=f"batch_size={size}"):
        make().batches(size)
    with pytest.raises(ValueError, match=f"batch_size={size}"):
        make().train_batches(size, **EPOCH)


# ---------------------------------------------------------------------------------- views


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_views(shape, padding, memory_format, device):
    images = make(*shape, device=device)
    rng = np.random.default_rng(1)
    indices = rng.integers(0, len(images), 30)
    views = rng.integers(0, images.view_count(padding), 30)
    raw = images.images.cpu().numpy()
    expected = np.stack(
        [naive_view(raw[i], v, padding) for i, v in zip(indices, views, strict=True)]
    )
    where = torch.from_numpy(indices).to(device), torch.from_numpy(views).to(device)
    x = images.views(*where, padding=padding, memory_format=memory_format)
    assert x.is_contiguous(memory_format=memory_format)
    close(x, naive_normalise(expected, images.mean, images.std))


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


@pytest.mark.parametrize("padding", [7, 10**5, 10**30, 1.5])
def test_a_padding_larger_than_the_image_is_refused(padding):
    images, zero = make(), torch.tensor([0])
    message = f"padding={re.escape(str(padding))}.*(6×5|whole)"
    with pytest.raises((ValueError, TypeError), match=message):
        images.train_batches(4, **EPOCH, padding=padding)
    with pytest.raises(ValueError, match="padding=-2"):
        images.view_count(-2)
    assert images.views(zero, zero, padding=6).shape == (1, 3, 6, 5)


def test_large_seeds():
    images = make(8)
    seeds = [2 * 10**13, 2**62, 2**63 - 1]
    orders = {tuple(images.order(seed=seed, step=0, epoch=0).tolist()) for seed in seeds}
    assert len(orders) == 3
    for seed in (2**63, 2e13, "1"):
        with pytest.raises((ValueError, TypeError), match=r"seed=.*(below 2\^63|whole number)"):
            images.train_batches(4, seed=seed, step=0, epoch=0)


def test_random_numbers_equal_recorded_ones():
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
        with pytest.raises(ValueError, match=f"{name}={value}"):
            images.order(**{**EPOCH, name: value})


def test_views_are_drawn_evenly():
    images = make(162 * 100, 1, 4, 4)
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


def test_augmentation_of_ones_own():
    images = make(21)
    drawn = []

    def darker(batch, generator):
        assert batch.dtype == torch.uint8
        drawn.append(torch.rand((), generator=generator).item())
        return batch // 2

    batches = list(images.train_batches(8, **EPOCH, augment=darker))
    for x, _, indices, ids in batches:
        cropped = images.normalise(pixels.crop(images.images[indices], ids, 4) // 2)
        assert torch.equal(x, cropped)
    list(images.train_batches(8, **EPOCH, augment=darker))
    for rank in (0, 1):
        list(images.train_batches(8, **EPOCH, augment=darker, rank=rank, world=2))
    assert drawn[:3] == drawn[3:6]  # the same in every process
    assert len(set(drawn[6:])) == 6  # of ranks and batches
    for wrong in (lambda x, _: x.float(), lambda x, _: x[:, :, 1:]):
        with pytest.raises(ValueError, match=r"augment= returned .*both must be alike"):
            next(images.train_batches(8, **EPOCH, augment=wrong))


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


def test_parts_outside_the_data_are_refused():
    images = make(10)
    for rank, world in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} of world {world}"):
            images.shard(rank, world)
    with pytest.raises(ValueError, match=r"first\(11\): there are 10"):
        images.first(11)
    with pytest.raises(IndexError, match="index 10"):
        images.subset([3, 10])
    with pytest.raises(AttributeError):
        images.classes = 3
