"""load: the data that has a name, and .npz files."""

from __future__ import annotations

import hashlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastbcd.data import cifar
from fastbcd.data.images import ImageData
from fastbcd.data.sources import as_data, load
from helpers.image_cases import make

EMBEDDED = ["1ed5c7bf87e37567", "6e8f8a41ac407232"]  # sha256 of images and labels, train and test
X = np.zeros((3, 3, 4, 4), np.uint8)


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
    stats = {"mean": np.array(train.mean), "std": np.array(train.std)}
    np.savez(
        file, **stats,
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
    assert ImageData.from_npz(file, "test", mean=(0.5, 0.4, 0.3)).mean == (0.5, 0.4, 0.3)
    np.savez(tmp_path / "plain.npz", images=test.images, labels=test.labels)
    plain = load(tmp_path / "plain.npz")
    assert torch.equal(plain.images, test.images)
    assert (plain.mean, plain.std) == ((0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train_images": X}, r"own.npz has no array 'train_labels'; it has train_images"),
        ({"x": X}, r"own.npz has no array 'train_images'; it has x"),
        ({"images": X, "labels": [0, 1, -4]}, r"own.npz, split 'train': labels\[2\] is -4"),
        (
            {"images": X.astype(float), "labels": [[0]]},
            r"own.npz, split 'train': labels are torch.int64 \[1, 1\] beside 3",
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
    monkeypatch.setitem(cifar.PUBLISHED, "test", 3)
    read = load("cifar10", "test", root=tmp_path, download=True)
    assert read.labels.tolist() == [7, 7, 7]
    assert (read.mean, read.classes) == ((0.4914, 0.4822, 0.4465), 10)


def test_the_name_stays_with_parts_of_the_data() -> None:
    data = load("fashion-mnist-mini", "test")
    parts = data, data.first(5), data.rest(5), data.shard(0, 2), data.subset([1, 2]), data.to("cpu")
    assert {part.name for part in parts} == {"fashion-mnist-mini"}
    assert as_data((data.images[:5], data.labels[:5])).name is None
