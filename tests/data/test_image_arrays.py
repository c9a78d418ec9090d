"""ImageData from arrays: layouts, statistics, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastbcd.data.images import ImageData
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
