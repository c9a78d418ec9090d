"""load: the data that has a name, and .npz files."""

from __future__ import annotations

import hashlib
import pickle
import sys
import zipfile

import numpy as np
import pytest
import torch

from fastbcd.data.npz import load_npz
from fastbcd.data.sources import as_data, load
from helpers.image_cases import make

EMBEDDED = ["1ed5c7bf87e37567", "6e8f8a41ac407232"]  # sha256 of images and labels, train and test
X = np.zeros((3, 3, 4, 4), np.uint8)


def digest(data):
    return hashlib.sha256(data.images.numpy().tobytes() + data.labels.numpy().tobytes()).hexdigest()


def test_embedded_data_is_whole():
    train, test = load("fashion-mnist-mini"), load("fashion-mnist-mini", "test")
    assert (len(train), len(test), train.classes) == (8000, 2000, 10)
    assert (train.mean, train.std) == (test.mean, test.std) == ((0.2860,), (0.3530,))
    assert [digest(train)[:16], digest(test)[:16]] == EMBEDDED


def test_load_refuses(tmp_path, monkeypatch, torchvision):
    with pytest.raises(ValueError, match=r"no data is called 'cifar11'; there are .*, cifar100"):
        load("cifar11")
    with pytest.raises(ValueError, match="split is 'val'; cifar10 has 'train' and 'test'"):
        load("cifar10", "val")
    monkeypatch.setenv("FASTBCD_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"no whole Tiny ImageNet in {tmp_path}.*unpack"):
        load("tiny-imagenet")


def test_the_name_stays_with_parts_of_the_data() -> None:
    data = load("fashion-mnist-mini", "test")
    parts = data, data.first(5), data.rest(5), data.shard(0, 2), data.subset([1, 2]), data.to("cpu")
    assert {part.name for part in parts} == {"fashion-mnist-mini"}
    assert as_data((data.images[:5], data.labels[:5])).name is None


# ------------------------------------------------------------------ .npz files


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
    assert load_npz(file, "test", mean=(0.5, 0.4, 0.3)).mean == (0.5, 0.4, 0.3)
    np.savez(tmp_path / "plain.npz", images=test.images, labels=test.labels)
    plain = load(tmp_path / "plain.npz")
    assert torch.equal(plain.images, test.images)
    assert (plain.mean, plain.std) == ((0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train_images": X}, r"own.npz has no array 'train_labels'; it has train_images"),
        ({"x": X}, r"own.npz has no array 'train_images'; it has x"),
        ({"images": X, "labels": [0, 1, -4]}, r"own.npz, split 'train': label -4 of image 2"),
        (
            {"images": X.astype(float), "labels": [[0]]},
            r"own.npz, split 'train': labels are torch.int64 \[1, 1\] beside 3",
        ),
        ({"images": X.astype(np.int16), "labels": [0] * 3}, "own.npz.*images are torch.int16"),
        ({"images": np.array([{}]), "labels": [0]}, r"own.npz: the array 'images' cannot be read"),
    ],
)
def test_npz_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises((ValueError, TypeError), match=message):
        load(tmp_path / "own.npz")


def test_damaged_npz(tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(FileNotFoundError, match=r"no file .*x\.npz"):
        load(path)
    np.savez(path, images=np.arange(1000), labels=np.arange(10))
    whole = path.read_bytes()
    damaged = [whole[:length] for length in (0, 1, 100, len(whole) // 2, len(whole) - 1)]
    damaged.append(whole[:2000] + b"\xff" + whole[2001:])
    np.save(tmp_path / "one.npy", np.zeros(10, np.uint8))
    one = (tmp_path / "one.npy").read_bytes()
    claims = one.replace(b"(10,), }".ljust(15), b"(10000000000,), }"[:15].ljust(15))
    with zipfile.ZipFile(tmp_path / "claims.npz", "w") as archive:
        archive.writestr("images.npy", claims)  # more than the file holds
    damaged += [one, (tmp_path / "claims.npz").read_bytes()]
    for raw in damaged:
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=r"x\.npz: the array .*damaged, cut short"):
            load(path)


# ------------------------------------------------------------------ CIFAR


def cifar(root, monkeypatch, datasets):
    """A small CIFAR-10 in which torchvision believes; returns the images and labels of train."""
    folder = root / datasets.CIFAR10.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    batch = {"data": pixels.reshape(6, -1), "labels": [0, 3, 9, 1, 2, 5]}
    contents = {"train": batch, "test": batch, "meta": {"label_names": list("0123456789")}}
    marks = {}
    for name, content in contents.items():
        raw = pickle.dumps(content)
        (folder / name).write_bytes(raw)
        marks[name] = hashlib.md5(raw).hexdigest()
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [["train", marks["train"]]])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test", marks["test"]]])
    meta = {"filename": "meta", "key": "label_names", "md5": marks["meta"]}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    return folder, pixels, batch["labels"]


def test_cifar(tmp_path, monkeypatch, torchvision):
    _, pixels, labels = cifar(tmp_path, monkeypatch, torchvision.datasets)
    for split in ("train", "test"):
        data = load("cifar10", split, tmp_path)
        assert np.array_equal(data.images, pixels)
        assert data.labels.tolist() == labels
        assert (data.classes, data.std, data.name) == (10, (0.2023, 0.1994, 0.2010), "cifar10")


class Attack:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return exec, (f"open({str(self.mark)!r}, 'w')",)


def test_other_cifar_files_are_refused_and_not_run(tmp_path, monkeypatch, torchvision):
    folder, *_ = cifar(tmp_path, monkeypatch, torchvision.datasets)
    whole = (folder / "train").read_bytes()
    for raw in (whole[:-1], whole + b" ", b"", pickle.dumps({"data": Attack(tmp_path / "run")})):
        (folder / "train").write_bytes(raw)
        with pytest.raises(FileNotFoundError, match=f"no cifar10 in {tmp_path}, or .*damaged"):
            load("cifar10", root=tmp_path)
    assert not (tmp_path / "run").exists()
    with pytest.raises(FileNotFoundError, match=rf"no cifar100 in {tmp_path}.*download=True"):
        load("cifar100", root=tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "tiny-imagenet"])
def test_known_data_needs_torchvision(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(
        ImportError, match=rf"{name} is read through torchvision.*fastbcd\[vision\]"
    ):
        load(name, root=tmp_path)


# ------------------------------------------------------------------ Tiny ImageNet


@pytest.fixture
def tiny(tmp_path, torchvision):
    """Two train images of each of three classes, of grey 10·class + number; two val images."""
    pil = pytest.importorskip("PIL.Image")

    def write(path, grey):
        path.parent.mkdir(parents=True, exist_ok=True)
        pil.new("L" if grey % 2 else "RGB", (8, 8), grey if grey % 2 else (grey,) * 3).save(path)

    root = tmp_path / "tiny-imagenet-200"
    for wnid in ("n03", "n01", "n02"):
        for i in range(2):
            write(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", 10 * int(wnid[1:]) + i)
    for i in range(2):
        write(root / "val" / "images" / f"val_{i}.JPEG", 100 + i)
    table = "val_1.JPEG\tn02\t0\t0\t62\t57\nval_0.JPEG\tn03\t0\t0\t62\t57\n"
    (root / "val" / "val_annotations.txt").write_text(table)
    return root


def test_tiny_imagenet(tiny):
    # One of each class in turn.
    expected = {
        "train": ([10, 20, 30, 11, 21, 31], [0, 1, 2, 0, 1, 2]),
        "test": ([101, 100], [1, 2]),
    }
    for root in (tiny, tiny.parent):
        for split, (greys, labels) in expected.items():
            data = load("tiny-imagenet", split, root)
            assert data.images.shape[1:] == (3, 8, 8)
            assert (data.images[:, :, 4, 4].int() - torch.tensor(greys)[:, None]).abs().max() <= 2
            assert data.labels.tolist() == labels
            assert data.classes == 200


def other_size(tiny):
    pil = pytest.importorskip("PIL.Image")
    pil.new("RGB", (9, 8)).save(tiny / "train" / "n02" / "images" / "n02_1.JPEG")


DAMAGES = {
    "no whole Tiny ImageNet.*val_annotations.txt": lambda tiny: (
        tiny / "val" / "val_annotations.txt"
    ).unlink(),
    "no whole Tiny ImageNet.*'n77'": lambda tiny: (tiny / "val" / "val_annotations.txt").write_text(
        "val_0.JPEG\tn77\n"
    ),
    "no whole Tiny ImageNet.*not enough values": lambda tiny: (
        tiny / "val" / "val_annotations.txt"
    ).write_text("val_0.JPEG\n"),
    "No such file .*val_1.JPEG": lambda tiny: (tiny / "val" / "images" / "val_1.JPEG").unlink(),
    "cannot identify image file .*n02_1.JPEG": lambda tiny: (
        tiny / "train" / "n02" / "images" / "n02_1.JPEG"
    ).write_bytes(b"x"),
    r"item 4 .*\(3, 8, 9\)": other_size,
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_tiny_imagenet(message, tiny):
    DAMAGES[message](tiny)
    with pytest.raises((ValueError, OSError), match=message):
        [load("tiny-imagenet", split, tiny) for split in ("train", "test")]


# ------------------------------------------------------------------ folders of images


def test_a_folder_of_images(tmp_path, torchvision):
    """One folder per class; "test" may be called "val"; both have the classes of train."""
    pil = pytest.importorskip("PIL.Image")
    for number, place in enumerate(("train/cat/a", "train/dog/b", "train/dog/c", "val/cat/d")):
        file = tmp_path / f"{place}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pil.new("RGB", (6, 8), (number, 0, 255)).save(file)
    name = f"folder:{tmp_path}"
    train = load(name)
    assert repr(train) == "ImageData(3 × 3×8×6 uint8, 2 classes, cpu)"
    assert (train.labels.tolist(), train.name) == ([0, 1, 1], name)
    assert train.images[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert float(next(train.batches(1))[0].max()) == 1.0
    with pytest.raises(ValueError, match=r"val has the classes \['cat'\], and .*'cat', 'dog'\]"):
        load(name, "test")
    (tmp_path / "test").symlink_to(tmp_path / "train")
    assert len(load(name, "test")) == 3
    pil.new("RGB", (9, 8)).save(tmp_path / "train" / "dog" / "z.png")
    with pytest.raises(ValueError, match="bring all to one size"):
        load(name)
    with pytest.raises(FileNotFoundError, match=r"has no images by class .*one folder of images"):
        load(f"folder:{tmp_path / 'nothing'}")
